"""The knobs of the Llama scripts for neuronx-distributed, under the names that they have there, as fields of a recipe.

They may stand among the hyperparameters of a run (`lt train run --hyperparameters FILE.json`), so that settings of a
script can be carried over as they are. Names of flags may be written as the flag is, without dashes: `logging_interval`
for `--logging_interval`. What has the same name and meaning in lt (SEQ_LEN, WARMUP_STEPS, MIN_LR, NUM_NODES) is a
hyperparameter already; here its flag is known too (`min_lr`, `beta1`). TOTAL_STEPS may be given in epochs and
WARMUP_STEPS as a share (`lt_trainer.horizon`).

Cost: one look-up per name.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from lt_trainer.errors import RecipeError
from lt_trainer.fields import leaves
from lt_trainer.hyperparameters import table
from lt_trainer_neuron.options import SECTION, NeuronOptions

__all__ = ["ALIASES", "fields_of"]

Meaning = Callable[[str, str], dict[str, Any]]
"""Of a name and its value as text: fields with their values as text."""


def _field(dotted: str) -> Meaning:
    return lambda name, value: {dotted: value}


def _switch(yes: Mapping[str, str], no: Mapping[str, str]) -> Meaning:
    """A flag of a script, 1 or 0, that stands for other fields."""

    def meaning(name: str, value: str) -> dict[str, Any]:
        if value not in ("0", "1"):
            raise RecipeError("a switch of the scripts", values={name: value}, remedy="write 1 or 0")
        return dict(yes if value == "1" else no)

    return meaning


def _kept(name: str, value: str) -> dict[str, Any]:
    """-1 keeps all, as in NxD."""
    return {"checkpoint.keep_every": "1"} if value == "-1" else {"checkpoint.keep_last": value}


def _loading_step(name: str, value: str) -> dict[str, Any]:
    known = {"latest_if_exists": "true", "latest": "true", "-1": "false"}
    if value not in known:
        raise RecipeError(
            "a run goes on from its highest complete step, or does not",
            values={name: value},
            remedy="write latest_if_exists or -1; to start from another checkpoint set model.init_from",
        )
    return {"checkpoint.resume": known[value]}


_PRECISION = f"{SECTION}.precision"
_OF_SCRIPTS: dict[str, Meaning] = {
    "TP_DEGREE": _field("parallel.tp"),
    "TENSOR_PARALLEL_SIZE": _field("parallel.tp"),
    "PP_DEGREE": _field("parallel.pp"),
    "PIPELINE_PARALLEL_SIZE": _field("parallel.pp"),
    "SEQUENCE_PARALLEL_ENABLED": _field("parallel.sequence_parallel"),
    "USE_SEQUENCE_PARALLEL": _field("parallel.sequence_parallel"),
    "SELECTIVE_CHECKPOINT_ENABLED": _field(f"{SECTION}.selective_checkpointing"),
    "USE_ZERO1_OPTIMIZER": _field(f"{SECTION}.zero1"),
    "GBS": _field("batch.global_batch"),
    "MBS": _field("batch.micro_batch"),
    "TOTAL_STEPS": _field("schedule.max_steps"),
    "LR": _field("optimizer.lr"),
    "LR_SCHEDULER": _field("schedule.kind"),
    "LOGGING_INTERVAL": _field("metrics.log_interval"),
    "CHECKPOINT_FREQ": _field("checkpoint.interval"),
    "NUM_KEPT_CHECKPOINT": _kept,
    "LOADING_STEP": _loading_step,
    "PRETRAINED_WEIGHT_DIR": _field("model.init_from"),
    "PRETRAINED_CHECKPOINT_DIR": _field("model.init_from"),
    "KV_SIZE_MULTIPLIER": _field(f"{SECTION}.kv_replicator"),
    "USE_MIX_PRECISION": _switch({_PRECISION: "downcast"}, {_PRECISION: "bf16_sr"}),
    "USE_GPU_COMPATIBLE_PRECISION": _switch({_PRECISION: "fp32_master"}, {}),
}
_OF_OPTIONS = {leaf.hp: _field(leaf.name) for leaf in leaves(NeuronOptions, f"{SECTION}.").values() if leaf.hp}
_FLAGS = frozenset(("seq_len", "max_steps", "warmup_steps", "min_lr", "beta1", "beta2", "weight_decay"))
"""Flags of the scripts whose names, in capitals, are hyperparameters of ours."""
ALIASES: Mapping[str, Meaning] = MappingProxyType(_OF_SCRIPTS | _OF_OPTIONS)
"""By name in upper case."""


def fields_of(name: str, value: Any) -> Mapping[str, Any] | None:
    """The fields that a script's knob sets, None where it is none.

    Args:
        name: as the scripts have it; case does not count.
        value: text, or the plain value that stands for it.

    Raises:
        RecipeError: a value that the knob does not have.
    """
    meaning = ALIASES.get(name.upper())
    if meaning is not None:
        return meaning(name, str(value))
    return {table()[name.upper()].name: str(value)} if name in _FLAGS else None
