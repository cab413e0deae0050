"""The knobs of the NxD Llama scripts as hyperparameters: each sets the field that means the same."""

import json
from pathlib import Path

import pytest

from lt_trainer.errors import RecipeError
from lt_trainer.hyperparameters import read, table
from lt_trainer.recipe import load, to_dict
from lt_trainer_neuron.aliases import ALIASES
from lt_trainer_neuron.options import NeuronOptions

BASE = {"run": {"engine": "neuron"}, "data": {"store": "stores/train"}, "model": {"preset": "llama2-7b"}}
OF_7B = {
    "TP_DEGREE": "8",
    "GBS": "2048",
    "MBS": "1",
    "SEQ_LEN": "4096",
    "TOTAL_STEPS": "31800",
    "WARMUP_STEPS": "1%",
    "LR": "1.5e-4",
    "MIN_LR": "0",
    "lr_scheduler": "linear",
    "NUM_NEURONCORES": "32",
    "NUM_NODES": "16",
    "USE_ZERO_1": "1",
    "USE_MIX_PRECISION": "0",
    "USE_SELECTIVE_CHECKPOINT": "1",
    "SEQUENCE_PARALLEL_ENABLED": "1",
    "logging_interval": "10",
    "checkpoint_freq": "10600",
    "num_kept_checkpoint": "3",
    "save_load_xser": "1",
    "loading_step": "latest_if_exists",
}


def test_the_settings_of_the_7b_script_resolve_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "hyperparameters.json"
    path.write_text(json.dumps(OF_7B))
    resolved = load(base=BASE, hyperparameters=read(path))
    recipe, options = resolved.recipe, resolved.recipe.engine["neuron"]
    assert (recipe.parallel.tp, recipe.parallel.n_nodes, recipe.parallel.sequence_parallel) == (8, 16, True)
    assert (recipe.batch.global_batch, recipe.batch.micro_batch, recipe.accumulation(512)) == (2048, 1, 32)
    assert (recipe.schedule.max_steps, recipe.schedule.warmup_steps, recipe.schedule.kind) == (31800, 318, "linear")
    assert (recipe.optimizer.lr, recipe.schedule.min_lr) == (1.5e-4, 0.0)
    assert (recipe.metrics.log_interval, recipe.checkpoint.interval, recipe.checkpoint.keep_last) == (10, 10600, 3)
    assert recipe.checkpoint.resume is True
    assert options == NeuronOptions(precision="bf16_sr")
    assert resolved.origins["parallel.tp"] == "hyperparameter TP_DEGREE"
    assert resolved.origins["metrics.log_interval"] == "hyperparameter logging_interval"


def test_the_knobs_of_the_70b_script() -> None:
    given = {
        "TP_DEGREE": "32",
        "PP_DEGREE": "8",
        "kv_replicator": "4",
        "qkv_linear": "1",
        "fuse_qkv": "1",
        "USE_MIX_PRECISION": "1",
        "use_flash_attention": "1",
        "num_kept_checkpoint": "-1",
        "pretrained_weight_dir": "",
    }
    recipe = load(base=BASE, hyperparameters=given, sets=["engine.neuron.num_neuroncores=32"]).recipe
    assert (recipe.parallel.tp, recipe.parallel.pp) == (32, 8)
    assert recipe.engine["neuron"] == NeuronOptions(
        qkv_linear=True, kv_replicator=4, fuse_qkv=True, precision="downcast", flash_attention=True
    )
    assert recipe.checkpoint.keep_every == 1


def test_every_knob_names_fields_that_exist_and_no_hyperparameter_of_ours() -> None:
    known = to_dict(load(base=BASE).recipe)
    for name, meaning in ALIASES.items():
        for dotted in meaning(name, "-1" if name == "LOADING_STEP" else "1"):
            inner = known
            for part in dotted.split("."):
                inner = inner[part]
    assert not set(ALIASES) & set(table())


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"GBS": "8", "GLOBAL_BATCH_SIZE": "8"}, "both set batch.global_batch; leave one of them out"),
        (
            {"USE_MIX_PRECISION": "1", "USE_GPU_COMPATIBLE_PRECISION": "1"},
            "both set engine.neuron.precision; leave one of them out",
        ),
        ({"USE_MIX_PRECISION": "yes"}, "USE_MIX_PRECISION = 'yes': a switch of the scripts; write 1 or 0"),
        ({"loading_step": "7000"}, "a run goes on from its highest complete step"),
        ({"ACC_STEPS": "4"}, "unknown hyperparameter"),
    ],
)
def test_what_contradicts_or_is_not_known_is_refused(given: dict[str, str], told: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load(base=BASE, hyperparameters=given)
    assert told in str(caught.value)
