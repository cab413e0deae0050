"""The environment variables that the Neuron runtime and compiler read, from a recipe.

The values are those of the Llama recipes for neuronx-distributed (7B, 8B and 70B). Variables that belong to a cluster
rather than to a recipe (root addresses, network interfaces) are the launcher's.
"""

from lt_trainer.recipe import Recipe, engine_options
from lt_trainer_neuron.options import NeuronOptions

__all__ = ["PRECISION", "neuron_env"]

PRECISION: dict[str, dict[str, str]] = {
    "bf16_sr": {"XLA_USE_BF16": "1", "NEURON_RT_STOCHASTIC_ROUNDING_EN": "1"},
    "downcast": {"XLA_DOWNCAST_BF16": "1", "NEURON_RT_STOCHASTIC_ROUNDING_EN": "0"},
    "fp32_master": {"NEURON_RT_STOCHASTIC_ROUNDING_EN": "0"},
}
"""Master weights in fp32 keep what rounding would lose, so only pure bf16 rounds stochastically."""

CORE_COUNT_VARIABLES = ("NEURON_RT_NUM_CORES", "NUM_NEURONCORES", "TPU_NUM_DEVICES", "TPU_CHIPS_PER_HOST_BOUNDS")

SEVERAL_NODES = {"FI_EFA_FORK_SAFE": "1", "FI_EFA_USE_DEVICE_RDMA": "1", "FI_PROVIDER": "efa"}


def neuron_env(recipe: Recipe) -> dict[str, str]:
    """Variables that every rank needs before a Neuron library loads, sorted by name."""
    options = engine_options(recipe, "neuron", NeuronOptions)
    variables = {
        "MALLOC_ARENA_MAX": str(options.malloc_arenas),
        "NEURON_CC_FLAGS": options.cc_flags,
        "NEURON_FUSE_SOFTMAX": "1",
        "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": str(options.max_inflight),
    }
    variables |= PRECISION[options.precision]
    variables |= dict.fromkeys(CORE_COUNT_VARIABLES, str(options.num_neuroncores))
    if options.compile_cache:
        variables["NEURON_COMPILE_CACHE_URL"] = options.compile_cache
    if recipe.parallel.n_nodes > 1:
        variables |= SEVERAL_NODES
    return dict(sorted(variables.items()))
