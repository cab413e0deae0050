"""The environment variables that the Neuron runtime, compiler and torch-xla read: from a recipe, each with its reason.

A pure function of the recipe, the SDK and what the person has set: a value of the person's own wins and is shown
beside ours, but for the variables that decide dtypes behind torch's back: against the recipe they are refused. The
values are those of the Llama recipes for neuronx-distributed (7B, 8B and 70B); XLA_DISABLE_FUNCTIONALIZATION is 0 for
every recipe, as the 70B recipe has it, since torch 2.9 needs it to be right.

Variables that belong to a cluster rather than to a recipe (root addresses, network interfaces) are the launcher's.

A process that sets them notes in `RECORD` which values were ours, so that neither a child nor a second run in the same
process takes them for the person's.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from lt_trainer.errors import RecipeError
from lt_trainer.recipe import Recipe, engine_options
from lt_trainer_neuron.options import SECTION, NeuronOptions
from lt_trainer_neuron.sdk import NEWEST, SDKS

__all__ = ["RECORD", "Variable", "check_environment", "neuron_env", "settings", "variables"]

RECORD = "LT_NEURON_ENV"
"""Variable that holds, as JSON, the values that were set by us."""

CORE_COUNT_VARIABLES = ("NEURON_RT_NUM_CORES", "NUM_NEURONCORES", "TPU_NUM_DEVICES", "TPU_CHIPS_PER_HOST_BOUNDS")

BF16_VARIABLES = ("XLA_USE_BF16", "XLA_DOWNCAST_BF16")
"""They decide dtypes behind torch's back: fp32 tensors are bfloat16 on the device."""


@dataclass(frozen=True, kw_only=True)
class Variable:
    """One variable.

    Attributes:
        name: of the variable.
        value: what a rank gets.
        reason: why ours is what it is, as half a sentence.
        ours: what the recipe says; differs from `value` where the person's own won.
    """

    name: str
    value: str
    reason: str
    ours: str

    @property
    def overridden(self) -> bool:
        """Whether the person's value won over another one of ours."""
        return self.value != self.ours


def _rows(recipe: Recipe, options: NeuronOptions) -> dict[str, tuple[str, str]]:
    """Value and reason by name."""
    cores = str(options.num_neuroncores)
    of_cores = f"one rank per NeuronCore ({SECTION}.num_neuroncores)"
    rows = {
        "MALLOC_ARENA_MAX": (str(options.malloc_arenas), "bounds what glibc keeps on the host per thread"),
        "NEURON_CC_FLAGS": (options.cc_flags, f"flags of the compiler ({SECTION}.cc_flags); part of the cache's key"),
        "NEURON_FUSE_SOFTMAX": ("1", "one fused softmax in the compiled graph, as in all NxD Llama recipes"),
        "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": (
            str(options.max_inflight),
            f"graphs that the host may queue ahead of a core ({SECTION}.max_inflight)",
        ),
        "XLA_DISABLE_FUNCTIONALIZATION": (
            "0",
            "with 1, torch-xla up to 2.9 may give wrong data where a matrix is split along its second dimension",
        ),
    }
    rows |= dict.fromkeys(CORE_COUNT_VARIABLES, (cores, of_cores))
    rows |= _precision(options)
    if options.compile_cache:
        reason = f"where compiled graphs are kept ({SECTION}.compile_cache)"
        rows["NEURON_COMPILE_CACHE_URL"] = (options.compile_cache, reason)
    if recipe.parallel.n_nodes > 1:
        nodes = f"{recipe.parallel.n_nodes} nodes talk over EFA (parallel.n_nodes)"
        rows["FI_PROVIDER"] = ("efa", nodes)
        rows["FI_EFA_USE_DEVICE_RDMA"] = ("1", f"{nodes}, past the host's memory")
        rows["FI_EFA_FORK_SAFE"] = ("1", f"{nodes}, and ranks fork")
    return rows


def _precision(options: NeuronOptions) -> dict[str, tuple[str, str]]:
    """Weights that have fp32 masters keep what rounding would lose, so only pure bf16 rounds stochastically."""
    said = f"{SECTION}.precision = {options.precision}"
    rounding, still = "NEURON_RT_STOCHASTIC_ROUNDING_EN", "deprecated, and read by torch-neuronx up to 2.9"
    if options.precision == "bf16_sr":
        return {
            rounding: ("1", f"{said}: bf16 weights without masters learn small updates only on average"),
            "XLA_USE_BF16": ("1", f"{said}: fp32 tensors are bf16 on the device; {still}"),
        }
    rows = {rounding: ("0", f"{said}: fp32 masters keep what rounding would lose")}
    if options.precision == "downcast":
        rows["XLA_DOWNCAST_BF16"] = ("1", f"{said}: fp32 tensors are bf16 on the device, fp64 ones fp32; {still}")
    return rows


def variables(recipe: Recipe, *, environ: Mapping[str, str], sdk: str = NEWEST) -> list[Variable]:
    """Every variable that a rank needs before a Neuron library loads, sorted by name.

    Args:
        recipe: with or without an `[engine.neuron]` section.
        environ: what is set already; a value in it that is not ours (`RECORD`) wins.
        sdk: the release that will read them; those of `SDKS` all read the same.

    Raises:
        RecipeError: an SDK that is not known.
    """
    if sdk not in SDKS:
        raise RecipeError(
            "not a release that this engine is made for", values={"--sdk": sdk}, remedy=f"use one of {', '.join(SDKS)}"
        )
    options = engine_options(recipe, "neuron", NeuronOptions)
    if options.backend == "cpu":
        return []
    own = _own(environ)
    return [
        Variable(name=name, value=own.get(name, ours), reason=reason, ours=ours)
        for name, (ours, reason) in sorted(_rows(recipe, options).items())
    ]


def neuron_env(recipe: Recipe, *, environ: Mapping[str, str] | None = None, sdk: str = NEWEST) -> dict[str, str]:
    """Name and value of `variables`; without `environ`, what the recipe alone says."""
    return {item.name: item.value for item in variables(recipe, environ=environ or {}, sdk=sdk)}


def settings(recipe: Recipe, environ: Mapping[str, str]) -> dict[str, str]:
    """What a process sets for itself and its children: the variables, and the record of those that are ours."""
    found = variables(recipe, environ=environ)
    own = _own(environ)
    ours = {name: environ[name] for name in _record(environ) if name in environ and name not in own}
    ours |= {item.name: item.value for item in found if item.name not in own}
    values = {item.name: item.value for item in found}
    return values | ({RECORD: json.dumps(ours, sort_keys=True)} if ours else {})


def check_environment(recipe: Recipe, environ: Mapping[str, str]) -> None:
    """Refuse what would change the precision behind the recipe's back.

    Raises:
        RecipeError: torch-xla is told to make fp32 tensors bfloat16, and the recipe says otherwise.
    """
    options = engine_options(recipe, "neuron", NeuronOptions)
    if options.backend == "cpu":
        return
    own, ours = _own(environ), _precision(options)
    for name in BF16_VARIABLES:
        wanted = name in ours
        if name in own and (own[name] not in ("", "0")) != wanted:
            does = "makes every fp32 tensor bfloat16 on the device, masters, moments and loss too"
            raise RecipeError(
                f"the environment's {name}={own[name]} "
                + ("would leave in fp32 what this precision has in bfloat16" if wanted else does),
                values={f"{SECTION}.precision": options.precision},
                remedy=f"unset {name}, or choose another precision",
            )


def _own(environ: Mapping[str, str]) -> dict[str, str]:
    """What the person has set: all but what the record says was set by us and still is what we set."""
    ours = _record(environ)
    return {name: value for name, value in environ.items() if name != RECORD and ours.get(name) != value}


def _record(environ: Mapping[str, str]) -> dict[str, str]:
    try:
        record = json.loads(environ.get(RECORD, "{}"))
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}
