"""Hyperparameter aliases: names from the Llama scripts for neuronx-distributed as recipe fields.

They are accepted among the hyperparameters of a run (`lt train run --hyperparameters FILE.json`), so that a script's
settings can be used unchanged. Names of flags are written without dashes: `logging_interval` for `--logging_interval`.
Names with the same meaning in lt (SEQ_LEN, WARMUP_STEPS, MIN_LR, NUM_NODES) are hyperparameters already; only their
flags are added here (`min_lr`, `beta1`). TOTAL_STEPS may be given in epochs and WARMUP_STEPS as a fraction
(`lt_trainer.config.run_length`).

Cost: one lookup per name.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from lt_trainer.config.hyperparameters import hyperparameter_fields
from lt_trainer.config.section import extra_of, leaves
from lt_trainer.errors import RecipeError
from lt_trainer_neuron.options import SECTION, NeuronOptions

AliasResolver = Callable[[str, str], dict[str, Any]]
"""Maps a name and its value as text to recipe fields with their values as text."""


def _field_alias(dotted: str) -> AliasResolver:
    return lambda name, value: {dotted: value}


def _switch_alias(fields_if_on: Mapping[str, str], fields_if_off: Mapping[str, str]) -> AliasResolver:
    """Return the resolver of a 0/1 flag that sets other fields."""

    def meaning(name: str, value: str) -> dict[str, Any]:
        if value not in ("0", "1"):
            raise RecipeError("must be 0 or 1", values={name: value}, remedy="write 1 or 0")
        return dict(fields_if_on if value == "1" else fields_if_off)

    return meaning


def _resolve_kept_checkpoints(name: str, value: str) -> dict[str, Any]:
    """Return the checkpoint retention fields; -1 keeps all, as in NxD."""
    return {"checkpoint.keep_every": "1"} if value == "-1" else {"checkpoint.keep_last": value}


def _resolve_loading_step(name: str, value: str) -> dict[str, Any]:
    known = {"latest_if_exists": "true", "latest": "true", "-1": "false"}
    if value not in known:
        raise RecipeError(
            "a run resumes from its latest checkpoint or not at all",
            values={name: value},
            remedy="write latest_if_exists or -1; to start from another checkpoint set model.init_from",
        )
    return {"checkpoint.resume": known[value]}


_PRECISION = f"{SECTION}.precision"
_SCRIPT_ALIASES: dict[str, AliasResolver] = {
    "TP_DEGREE": _field_alias("parallel.tp"),
    "TENSOR_PARALLEL_SIZE": _field_alias("parallel.tp"),
    "PP_DEGREE": _field_alias("parallel.pp"),
    "PIPELINE_PARALLEL_SIZE": _field_alias("parallel.pp"),
    "SEQUENCE_PARALLEL_ENABLED": _field_alias("parallel.sequence_parallel"),
    "USE_SEQUENCE_PARALLEL": _field_alias("parallel.sequence_parallel"),
    "SELECTIVE_CHECKPOINT_ENABLED": _field_alias(f"{SECTION}.selective_checkpointing"),
    "USE_ZERO1_OPTIMIZER": _field_alias(f"{SECTION}.zero1"),
    "GBS": _field_alias("batch.global_batch_size"),
    "MBS": _field_alias("batch.micro_batch_size"),
    "TOTAL_STEPS": _field_alias("schedule.max_steps"),
    "LR": _field_alias("optimizer.lr"),
    "LR_SCHEDULER": _field_alias("schedule.kind"),
    "LOGGING_INTERVAL": _field_alias("metrics.log_interval"),
    "CHECKPOINT_FREQ": _field_alias("checkpoint.interval"),
    "NUM_KEPT_CHECKPOINT": _resolve_kept_checkpoints,
    "LOADING_STEP": _resolve_loading_step,
    "PRETRAINED_WEIGHT_DIR": _field_alias("model.init_from"),
    "PRETRAINED_CHECKPOINT_DIR": _field_alias("model.init_from"),
    "KV_SIZE_MULTIPLIER": _field_alias(f"{SECTION}.kv_size_multiplier"),
    "USE_MIX_PRECISION": _switch_alias({_PRECISION: "downcast"}, {_PRECISION: "bf16_sr"}),
    "USE_GPU_COMPATIBLE_PRECISION": _switch_alias({_PRECISION: "fp32_master_weights"}, {}),
}
_OPTION_ALIASES = {
    name: _field_alias(dotted)
    for dotted, field in leaves(NeuronOptions, f"{SECTION}.").items()
    if (name := extra_of(field, "hyperparameter"))
}
_SCRIPT_FLAGS = frozenset(("seq_len", "max_steps", "warmup_steps", "min_lr", "beta1", "beta2", "weight_decay"))
"""Script flags whose upper-case names are hyperparameters of lt."""
ALIASES: Mapping[str, AliasResolver] = MappingProxyType(_SCRIPT_ALIASES | _OPTION_ALIASES)
"""Resolvers by upper-case name."""


def resolve_alias(name: str, value: Any) -> Mapping[str, Any] | None:
    """Return the recipe fields that a script's hyperparameter sets, or None if it is unknown.

    Args:
        name: name as in the scripts; case-insensitive.
        value: text or the equivalent plain value.

    Raises:
        RecipeError: the hyperparameter does not accept the value.
    """
    meaning = ALIASES.get(name.upper())
    if meaning is not None:
        return meaning(name, str(value))
    return {hyperparameter_fields()[name.upper()]: str(value)} if name in _SCRIPT_FLAGS else None
