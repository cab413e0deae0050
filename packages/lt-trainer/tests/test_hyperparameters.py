"""The twenty names of the Litespark algorithm, with its defaults; and how a hyperparameters.json is read."""

import json
from pathlib import Path

import pytest

from lt_trainer.config.hyperparameters import hyperparameter_fields, hyperparameter_values, read_hyperparameters
from lt_trainer.config.recipe import load, to_dict
from lt_trainer.config.section import leaves
from lt_trainer.config.sections import Recipe
from lt_trainer.errors import RecipeError

LITESPARK = {
    "GLOBAL_BATCH_SIZE": ("batch.global_batch_size", 256),
    "MICRO_BATCH_SIZE": ("batch.micro_batch_size", 4),
    "NUM_NODES": ("parallel.n_nodes", 1),
    "HIDDEN_SIZE": ("model.hidden_size", 768),
    "INTERMEDIATE_SIZE": ("model.intermediate_size", 2072),
    "N_HEADS": ("model.n_heads", 12),
    "N_KV_HEADS": ("model.n_kv_heads", 12),
    "N_LAYERS": ("model.n_layers", 12),
    "SEQ_LEN": ("data.seq_len", 4096),
    "VOCAB_SIZE": ("model.vocab_size", 0),
    "TOKENIZER": ("data.tokenizer", "mindbeam-ai/Litespark"),
    "LEARNING_RATE": ("optimizer.lr", 1.6e-3),
    "MAX_STEPS": ("schedule.max_steps", 10000),
    "WARMUP_STEPS": ("schedule.warmup_steps", 500),
    "WEIGHT_DECAY": ("optimizer.weight_decay", 0.01),
    "BETA1": ("optimizer.beta1", 0.9),
    "BETA2": ("optimizer.beta2", 0.95),
    "GRAD_CLIP": ("optimizer.grad_clip", 1.0),
    "MIN_LR": ("schedule.min_lr", 4e-4),
    "CHECKPOINT_INTERVAL": ("checkpoint.interval", 1000),
}


def test_exactly_the_twenty_names_and_defaults() -> None:
    fields = leaves(Recipe)
    found = {name: (dotted, fields[dotted].default) for name, dotted in hyperparameter_fields().items()}
    assert len(LITESPARK) == 20
    assert found == LITESPARK
    assert {name: type(value[1]) for name, value in found.items()} == {n: type(v[1]) for n, v in LITESPARK.items()}


def test_the_defaults_are_what_an_empty_recipe_holds() -> None:
    values = to_dict(Recipe())
    for name, default in LITESPARK.values():
        section, field = name.split(".")
        assert values[section][field] == default


def test_every_one_of_them_sets_its_field_from_text() -> None:
    given = {
        "GLOBAL_BATCH_SIZE": "512",
        "MICRO_BATCH_SIZE": "8",
        "NUM_NODES": "2",
        "HIDDEN_SIZE": "1024",
        "INTERMEDIATE_SIZE": "2816",
        "N_HEADS": "16",
        "N_KV_HEADS": "4",
        "N_LAYERS": "24",
        "SEQ_LEN": "2048",
        "VOCAB_SIZE": "32000",
        "TOKENIZER": '"org/model"',
        "LEARNING_RATE": "1e-3",
        "MAX_STEPS": "1_000",
        "WARMUP_STEPS": "100",
        "WEIGHT_DECAY": ".1",
        "BETA1": "0.8",
        "BETA2": "0.99",
        "GRAD_CLIP": "0.5",
        "MIN_LR": "1e-4",
        "CHECKPOINT_INTERVAL": "50",
    }
    assert given.keys() == LITESPARK.keys()
    resolved = load(base={"data": {"store": "s"}}, hyperparameters=given)
    values = to_dict(resolved.recipe)
    got = {hp: values[name.split(".")[0]][name.split(".")[1]] for hp, (name, _) in LITESPARK.items()}
    assert got == {
        "GLOBAL_BATCH_SIZE": 512,
        "MICRO_BATCH_SIZE": 8,
        "NUM_NODES": 2,
        "HIDDEN_SIZE": 1024,
        "INTERMEDIATE_SIZE": 2816,
        "N_HEADS": 16,
        "N_KV_HEADS": 4,
        "N_LAYERS": 24,
        "SEQ_LEN": 2048,
        "VOCAB_SIZE": 32000,
        "TOKENIZER": "org/model",
        "LEARNING_RATE": 0.001,
        "MAX_STEPS": 1000,
        "WARMUP_STEPS": 100,
        "WEIGHT_DECAY": 0.1,
        "BETA1": 0.8,
        "BETA2": 0.99,
        "GRAD_CLIP": 0.5,
        "MIN_LR": 0.0001,
        "CHECKPOINT_INTERVAL": 50,
    }
    for hp, (name, _) in LITESPARK.items():
        assert resolved.origins[name] == f"hyperparameter {hp}"


def test_reserved_keys_of_sagemaker_are_dropped() -> None:
    given = {"sagemaker_program": '"train.py"', "sagemaker_region": "x", "BETA1": "0.8"}
    found = hyperparameter_values(given)
    assert found == {"optimizer.beta1": ("0.8", "hyperparameter BETA1")}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "HIDEN_SIZE",
            "HIDEN_SIZE = '512': unknown hyperparameter; did you mean HIDDEN_SIZE?",
        ),
        (
            "hidden_size",
            "hidden_size = '512': unknown hyperparameter; did you mean HIDDEN_SIZE?",
        ),
        (
            "ZZZ",
            "ZZZ = '512': unknown hyperparameter; the hyperparameters are " + ", ".join(hyperparameter_fields()),
        ),
    ],
)
def test_unknown_names(name: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        hyperparameter_values({name: "512"})
    assert str(caught.value) == message


def test_reading_the_file(tmp_path: Path) -> None:
    path = tmp_path / "hyperparameters.json"
    path.write_text(json.dumps({"BETA1": "0.8", "sagemaker_program": "x"}))
    assert read_hyperparameters(path) == {"BETA1": "0.8", "sagemaker_program": "x"}


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "hyperparameters.json"
    with pytest.raises(RecipeError, match=r"cannot read the hyperparameters .*No such file"):
        read_hyperparameters(path)
    for content in (b"{", b"\xff\xfe\x00", b"[1]", b'{"BETA1": [1]}'):
        path.write_bytes(content)
        with pytest.raises(RecipeError, match=r"are not valid JSON: .*; write \{\"LEARNING_RATE"):
            read_hyperparameters(path)


def test_a_wrong_value_names_the_hyperparameter() -> None:
    with pytest.raises(RecipeError) as caught:
        load(base={"data": {"store": "s"}}, hyperparameters={"N_LAYERS": "1.5"})
    assert str(caught.value) == ("model.n_layers = '1.5' (hyperparameter N_LAYERS): must be a valid integer")
