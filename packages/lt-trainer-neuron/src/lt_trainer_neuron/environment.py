"""Environment variables of the Neuron runtime, compiler and torch-xla for a recipe, with reasons.

A pure function of the recipe and the user's environment. A value that the user has set takes precedence and is
listed together with the recipe's value. The exception are variables that change dtypes without torch knowing: if they
contradict the recipe, an error is raised. The values are those of the Llama recipes for neuronx-distributed (7B, 8B and
70B); XLA_DISABLE_FUNCTIONALIZATION is 0 for every recipe, as in the 70B recipe, since torch 2.9 needs it to be correct.

Variables that belong to a cluster rather than to a recipe (root addresses, network interfaces) are set by the launcher.
One is of neither: torch-xla gives a process the NeuronCore of its rank only if it takes torchrun for its launcher
(`launch_env`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from lt_trainer.config.recipe import engine_options
from lt_trainer.config.sections import Recipe
from lt_trainer.errors import RecipeError
from lt_trainer_neuron.options import SECTION, NeuronOptions

TORCHRUN_VARIABLE = "TORCHELASTIC_RUN_ID"
"""Variable whose existence is what `torch.distributed.is_torchelastic_launched` asks for."""

CORE_COUNT_VARIABLES = ("NEURON_RT_NUM_CORES", "NUM_NEURONCORES", "TPU_NUM_DEVICES", "TPU_CHIPS_PER_HOST_BOUNDS")

BF16_VARIABLES = ("XLA_USE_BF16", "XLA_DOWNCAST_BF16")
"""They change dtypes without torch knowing: fp32 tensors are bfloat16 on the device."""


@dataclass(frozen=True, kw_only=True)
class EnvVariable:
    """Environment variable with its reason.

    Attributes:
        name: name of the variable.
        value: value in a rank's environment.
        reason: reason for the recipe's value, as a phrase.
        recipe_value: value by the recipe; differs from `value` if the user's takes precedence.
    """

    name: str
    value: str
    reason: str
    recipe_value: str

    @property
    def is_overridden(self) -> bool:
        """True if the user's value overrides a different value of the recipe."""
        return self.value != self.recipe_value


def _default_variables(recipe: Recipe, options: NeuronOptions) -> dict[str, tuple[str, str]]:
    """Return value and reason by variable name."""
    of_cores = str(options.num_neuroncores), f"one rank per NeuronCore ({SECTION}.num_neuroncores)"
    rows = {
        "MALLOC_ARENA_MAX": (str(options.malloc_arenas), "limits the malloc arenas that glibc keeps per thread"),
        "NEURON_CC_FLAGS": (options.cc_flags, f"flags of the compiler ({SECTION}.cc_flags); part of the cache's key"),
        "NEURON_FUSE_SOFTMAX": ("1", "one fused softmax in the compiled graph, as in all NxD Llama recipes"),
        "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": (
            str(options.max_inflight),
            f"graphs the host may queue ahead of a core ({SECTION}.max_inflight)",
        ),
        "XLA_DISABLE_FUNCTIONALIZATION": (
            "0",
            "with 1, torch-xla up to 2.9 may give wrong data where a matrix is split along its second dimension",
        ),
    }
    rows |= dict.fromkeys(CORE_COUNT_VARIABLES, of_cores) | _precision_variables(options)
    if options.compile_cache:
        rows["NEURON_COMPILE_CACHE_URL"] = options.compile_cache, f"cache of graphs ({SECTION}.compile_cache)"
    if recipe.parallel.n_nodes > 1:
        nodes = f"{recipe.parallel.n_nodes} nodes communicate over EFA (parallel.n_nodes)"
        rows["FI_PROVIDER"] = ("efa", nodes)
        rows["FI_EFA_USE_DEVICE_RDMA"] = ("1", f"{nodes}, bypassing host memory")
        rows["FI_EFA_FORK_SAFE"] = ("1", f"{nodes}, and ranks fork")
    return rows


def _precision_variables(options: NeuronOptions) -> dict[str, tuple[str, str]]:
    """Return the variables of the precision, with reasons.

    fp32 master weights keep what rounding would lose, so only pure bf16 uses stochastic rounding.
    """
    setting, rounding = f"{SECTION}.precision = {options.precision}", "NEURON_RT_STOCHASTIC_ROUNDING_EN"
    casts = f"{setting}: fp32 tensors are bf16 on the device; deprecated, and read by torch-neuronx up to 2.9"
    if options.precision == "bf16_sr":
        reason = f"{setting}: without master weights, bf16 weights take up small updates only on average"
        return {rounding: ("1", reason), "XLA_USE_BF16": ("1", casts)}
    rows = {rounding: ("0", f"{setting}: fp32 master weights keep what rounding would lose")}
    return rows | ({"XLA_DOWNCAST_BF16": ("1", f"{casts}; fp64 ones fp32")} if options.precision == "downcast" else {})


def list_variables(recipe: Recipe, *, environ: Mapping[str, str]) -> list[EnvVariable]:
    """Return all variables that a rank needs before a Neuron library loads, sorted by name.

    Args:
        recipe: recipe with or without an `[engine.neuron]` section.
        environ: current environment; its values take precedence.
    """
    options = engine_options(recipe, "neuron", NeuronOptions)
    return [
        EnvVariable(name=name, value=environ.get(name, value), reason=reason, recipe_value=value)
        for name, (value, reason) in sorted(_default_variables(recipe, options).items())
        if options.backend != "cpu"
    ]


def neuron_env(recipe: Recipe, environ: Mapping[str, str]) -> dict[str, str]:
    """Return values of `list_variables` by name."""
    return {item.name: item.value for item in list_variables(recipe, environ=environ)}


def launch_env(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable by which torch-xla knows a rank, unless torchrun has set it.

    Without it torch-xla 2.9 sets neither NEURON_RT_VISIBLE_CORES nor the ranks for PJRT: each process would reserve all
    cores of the node, as rank 0 of one.
    """
    is_rank = "RANK" in environ
    return {TORCHRUN_VARIABLE: "lt"} if is_rank and TORCHRUN_VARIABLE not in environ else {}


def check_environment(recipe: Recipe, environ: Mapping[str, str]) -> None:
    """Raise if the environment changes the precision set in the recipe.

    Raises:
        RecipeError: a variable makes torch-xla use bfloat16 for fp32 tensors, and the recipe does not.
    """
    options = engine_options(recipe, "neuron", NeuronOptions)
    for name in BF16_VARIABLES if options.backend != "cpu" else ():
        wanted = name in _precision_variables(options)
        if name in environ and (environ[name] not in ("", "0")) != wanted:
            effect = (
                "leaves in fp32 what this precision computes in bfloat16"
                if wanted
                else "makes every fp32 tensor bfloat16 on the device, also master weights, optimizer state and loss"
            )
            raise RecipeError(
                f"the environment's {name}={environ[name]} {effect}",
                values={f"{SECTION}.precision": options.precision},
                remedy=f"unset {name}, or choose another precision",
            )
