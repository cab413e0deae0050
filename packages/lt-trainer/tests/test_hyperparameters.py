"""The twenty names of the Litespark algorithm, with its defaults; and how a hyperparameters.json is read."""

import json
from pathlib import Path

import pytest

from lt_trainer.config.hyperparameters import hyperparameter_fields, hyperparameter_values, read_hyperparameters
from lt_trainer.config.recipe import load
from lt_trainer.config.sections import Recipe
from lt_trainer.errors import RecipeError

LITESPARK = {
    "GLOBAL_BATCH_SIZE": ("batch.global_batch_size", 256, "512"),
    "MICRO_BATCH_SIZE": ("batch.micro_batch_size", 4, "8"),
    "NUM_NODES": ("parallel.n_nodes", 1, "2"),
    "HIDDEN_SIZE": ("model.hidden_size", 768, "1024"),
    "INTERMEDIATE_SIZE": ("model.intermediate_size", 2072, "2816"),
    "N_HEADS": ("model.n_heads", 12, "16"),
    "N_KV_HEADS": ("model.n_kv_heads", 12, "4"),
    "N_LAYERS": ("model.n_layers", 12, "24"),
    "SEQ_LEN": ("data.seq_len", 4096, "2048"),
    "VOCAB_SIZE": ("model.vocab_size", 0, "32000"),
    "TOKENIZER": ("data.tokenizer", "mindbeam-ai/Litespark", '"org/model"'),
    "LEARNING_RATE": ("optimizer.lr", 1.6e-3, "1e-3"),
    "MAX_STEPS": ("schedule.max_steps", 10000, "1_000"),
    "WARMUP_STEPS": ("schedule.warmup_steps", 500, "100"),
    "WEIGHT_DECAY": ("optimizer.weight_decay", 0.01, ".1"),
    "BETA1": ("optimizer.beta1", 0.9, "0.8"),
    "BETA2": ("optimizer.beta2", 0.95, "0.99"),
    "GRAD_CLIP": ("optimizer.grad_clip", 1.0, "0.5"),
    "MIN_LR": ("schedule.min_lr", 4e-4, "1e-4"),
    "CHECKPOINT_INTERVAL": ("checkpoint.interval", 1000, "50"),
}
"""Field, default and another value as text."""


def test_exactly_the_twenty_names_and_defaults() -> None:
    found = {name: (dotted, repr(Recipe().value(dotted))) for name, dotted in hyperparameter_fields().items()}
    assert found == {name: (dotted, repr(default)) for name, (dotted, default, _) in LITESPARK.items()}
    assert len(LITESPARK) == 20


def test_every_one_of_them_sets_its_field_from_text() -> None:
    given = {name: text for name, (_, _, text) in LITESPARK.items()} | {"sagemaker_program": "train.py"}
    resolved = load(base={"data": {"store": "s"}}, hyperparameters=given)
    for name, (dotted, default, text) in LITESPARK.items():
        assert resolved.recipe.value(dotted) == type(default)(text.strip('"'))
        assert resolved.origins[dotted] == f"hyperparameter {name}"


def test_unknown_names_and_wrong_values() -> None:
    cases = {"hidden_size": r"did you mean HIDDEN_SIZE\?", "QQ": "the hyperparameters are .*MIN_LR"}
    for name, remedy in cases.items():
        with pytest.raises(RecipeError, match=f"{name} = 512: unknown hyperparameter; {remedy}"):
            hyperparameter_values({name: "512"})
    with pytest.raises(RecipeError, match=r"model\.n_layers = 1\.5 \(hyperparameter N_LAYERS\): must be a valid int"):
        load(base={"data": {"store": "s"}}, hyperparameters={"N_LAYERS": "1.5"})


def test_reading_the_file(tmp_path: Path) -> None:
    path = tmp_path / "hyperparameters.json"
    with pytest.raises(RecipeError, match=r"cannot read the hyperparameters .*No such file"):
        read_hyperparameters(path)
    path.write_text(json.dumps({"BETA1": "0.8", "sagemaker_program": "x"}))
    assert read_hyperparameters(path) == {"BETA1": "0.8", "sagemaker_program": "x"}
    for content in (b"{", b'{"BETA1": [1]}'):
        path.write_bytes(content)
        with pytest.raises(RecipeError, match=r"are not one JSON object of strings; write \{\"LEARNING_RATE"):
            read_hyperparameters(path)
