"""The knobs of the NxD Llama scripts as hyperparameters: each sets the field that means the same."""

import json
from pathlib import Path

import pytest

from lt_trainer.config.hyperparameters import read_hyperparameters
from lt_trainer.config.recipe import load, to_dict
from lt_trainer.errors import RecipeError
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
    resolved = load(base=BASE, hyperparameters=read_hyperparameters(path))
    recipe, options = resolved.recipe, resolved.recipe.engine["neuron"]
    assert (recipe.parallel.tp, recipe.parallel.n_nodes, recipe.parallel.sequence_parallel) == (8, 16, True)
    assert (recipe.batch.global_batch_size, recipe.batch.micro_batch_size) == (2048, 1)
    assert recipe.accumulation_steps(512) == 32
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
    recipe = load(base=BASE, hyperparameters=given, overrides=["engine.neuron.num_neuroncores=32"]).recipe
    assert (recipe.parallel.tp, recipe.parallel.pp) == (32, 8)
    assert recipe.engine["neuron"] == NeuronOptions(
        qkv_linear=True, kv_size_multiplier=4, fuse_qkv=True, precision="downcast", flash_attention=True
    )
    assert recipe.checkpoint.keep_every == 1


KNOBS = [  # what the two scripts do not set
    ("tensor_parallel_size", "16", "parallel.tp", 16),
    ("pipeline_parallel_size", "8", "parallel.pp", 8),
    ("NUM_NEURONCORES", "2", "engine.neuron.num_neuroncores", 2),
    ("use_sequence_parallel", "1", "parallel.sequence_parallel", True),
    ("MBS", "2", "batch.micro_batch_size", 2),
    ("seq_len", "2048", "data.seq_len", 2048),
    ("max_steps", "30000", "schedule.max_steps", 30000),
    ("warmup_steps", "2000", "schedule.warmup_steps", 2000),
    ("min_lr", "1e-6", "schedule.min_lr", 1e-6),
    ("lr_scheduler", "cosine", "schedule.kind", "cosine"),
    ("beta1", "0.91", "optimizer.beta1", 0.91),
    ("beta2", "0.999", "optimizer.beta2", 0.999),
    ("weight_decay", "0.01", "optimizer.weight_decay", 0.01),
    ("USE_ZERO_1", "0", "engine.neuron.zero1", False),
    ("use_zero1_optimizer", "0", "engine.neuron.zero1", False),
    ("USE_MIX_PRECISION", "0", "engine.neuron.precision", "bf16_sr"),
    ("use_gpu_compatible_precision", "1", "engine.neuron.precision", "fp32_master_weights"),
    ("use_selective_checkpoint", "0", "engine.neuron.selective_checkpointing", False),
    ("selective_checkpoint_enabled", "0", "engine.neuron.selective_checkpointing", False),
    ("kv_size_multiplier", "4", "engine.neuron.kv_size_multiplier", 4),
    ("save_load_xser", "0", "engine.neuron.save_xser", False),
    ("loading_step", "-1", "checkpoint.resume", False),
]


@pytest.mark.parametrize(("name", "value", "dotted", "wanted"), KNOBS, ids=lambda part: str(part))
def test_each_knob_of_the_scripts_sets_its_field(name: str, value: str, dotted: str, wanted: object) -> None:
    needed = {"sequence_parallel": "parallel.tp=8", "kv_size": "engine.neuron.qkv_linear=true"}
    needed["fuse"] = needed["kv_size"]
    sets = [given for part, given in needed.items() if part in dotted]  # alone they have no effect, and are refused
    resolved = load(base=BASE, hyperparameters={name: value}, overrides=sets)
    inner = to_dict(resolved.recipe)
    for part in dotted.split("."):
        inner = inner[part]
    assert inner == wanted
    assert resolved.origins[dotted] == f"hyperparameter {name}"


@pytest.mark.parametrize("name", ["pretrained_checkpoint_dir", "pretrained_weight_dir", "PRETRAINED_WEIGHT_DIR"])
def test_pretrained_weights_are_looked_for_where_the_scripts_say(name: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=f"model.init_from = .* \\(hyperparameter {name}\\): .*no such file"):
        load(base=BASE | {"model": {}}, hyperparameters={name: str(tmp_path / "missing")})


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"GBS": "8", "GLOBAL_BATCH_SIZE": "8"}, "both set batch.global_batch_size; remove one of them"),
        (
            {"USE_MIX_PRECISION": "1", "USE_GPU_COMPATIBLE_PRECISION": "1"},
            "both set engine.neuron.precision; remove one of them",
        ),
        ({"USE_MIX_PRECISION": "yes"}, 'USE_MIX_PRECISION = "yes": must be 0 or 1; write 1 or 0'),
        ({"loading_step": "7000"}, "a run resumes from its latest checkpoint or not at all"),
        ({"ACC_STEPS": "4"}, "unknown hyperparameter"),
    ],
)
def test_what_contradicts_or_is_not_known_is_refused(given: dict[str, str], told: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load(base=BASE, hyperparameters=given)
    assert told in str(caught.value)
