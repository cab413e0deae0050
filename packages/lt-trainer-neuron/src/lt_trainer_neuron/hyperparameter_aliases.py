"""Hyperparameter aliases: names from the Llama scripts for neuronx-distributed as recipe fields.

They are accepted among the hyperparameters of a run (`lt train run --hyperparameters FILE.json`), so that a script's
settings can be used unchanged. Names of flags are written without dashes: `logging_interval` for `--logging_interval`.
Names with the same meaning in lt (SEQ_LEN, WARMUP_STEPS, MIN_LR, NUM_NODES) are hyperparameters already; only their
flags are added here (`min_lr`, `beta1`). TOTAL_STEPS may be given in epochs and WARMUP_STEPS as a fraction
(`lt_trainer.config.run_length`).

Cost: one lookup per name.
"""

from collections.abc import Mapping
from typing import Any

from lt_trainer.config.hyperparameters import hyperparameter_fields
from lt_trainer.config.section import extra_of, leaves
from lt_trainer.errors import RecipeError
from lt_trainer_neuron.options import SECTION, NeuronOptions

_PRECISION, _RESUME = f"{SECTION}.precision", "checkpoint.resume"
_FIELDS: Mapping[str, str] = {
    "TP_DEGREE": "parallel.tp",
    "TENSOR_PARALLEL_SIZE": "parallel.tp",
    "PP_DEGREE": "parallel.pp",
    "PIPELINE_PARALLEL_SIZE": "parallel.pp",
    "SEQUENCE_PARALLEL_ENABLED": "parallel.sequence_parallel",
    "USE_SEQUENCE_PARALLEL": "parallel.sequence_parallel",
    "SELECTIVE_CHECKPOINT_ENABLED": f"{SECTION}.selective_checkpointing",
    "USE_ZERO1_OPTIMIZER": f"{SECTION}.zero1",
    "GBS": "batch.global_batch_size",
    "MBS": "batch.micro_batch_size",
    "TOTAL_STEPS": "schedule.max_steps",
    "LR": "optimizer.lr",
    "LR_SCHEDULER": "schedule.kind",
    "LOGGING_INTERVAL": "metrics.log_interval",
    "CHECKPOINT_FREQ": "checkpoint.interval",
    "NUM_KEPT_CHECKPOINT": "checkpoint.keep_last",
    "PRETRAINED_WEIGHT_DIR": "model.init_from",
    "PRETRAINED_CHECKPOINT_DIR": "model.init_from",
    "KV_SIZE_MULTIPLIER": f"{SECTION}.kv_size_multiplier",
    **{
        name: dotted
        for dotted, field in leaves(NeuronOptions, f"{SECTION}.").items()
        if (name := extra_of(field, "hyperparameter"))
    },
}
"""Upper-case name → the field of the same value."""
_SWITCH = "must be 0 or 1", "write 1 or 0"
_VALUES: Mapping[str, tuple[str, str, Mapping[str, Mapping[str, str]]]] = {
    "USE_MIX_PRECISION": (*_SWITCH, {"0": {_PRECISION: "bf16_sr"}, "1": {_PRECISION: "downcast"}}),
    "USE_GPU_COMPATIBLE_PRECISION": (*_SWITCH, {"0": {}, "1": {_PRECISION: "fp32_master_weights"}}),
    "LOADING_STEP": (
        "a run resumes from its latest checkpoint or not at all",
        "write latest_if_exists or -1; to start from another checkpoint set model.init_from",
        {"latest_if_exists": {_RESUME: "true"}, "latest": {_RESUME: "true"}, "-1": {_RESUME: "false"}},
    ),
}
"""Upper-case name → what is wrong with any other value, the remedy, and the fields that each value sets."""
_SCRIPT_FLAGS = frozenset(("seq_len", "max_steps", "warmup_steps", "min_lr", "beta1", "beta2", "weight_decay"))
"""Script flags whose upper-case names are hyperparameters of lt."""


def resolve_alias(name: str, value: Any) -> Mapping[str, Any] | None:
    """Return the recipe fields that a script's hyperparameter sets, or None if it is unknown.

    Args:
        name: name as in the scripts; case-insensitive.
        value: text or the equivalent plain value.

    Raises:
        RecipeError: the hyperparameter does not accept the value.
    """
    key, text = name.upper(), str(value)
    if (key, text) == ("NUM_KEPT_CHECKPOINT", "-1"):  # all, as in NxD
        return {"checkpoint.keep_every": "1"}
    if key in _FIELDS:
        return {_FIELDS[key]: text}
    if key in _VALUES:
        problem, remedy, meanings = _VALUES[key]
        if text not in meanings:
            raise RecipeError(problem, values={name: text}, remedy=remedy)
        return meanings[text]
    return {hyperparameter_fields()[key]: text} if name in _SCRIPT_FLAGS else None
