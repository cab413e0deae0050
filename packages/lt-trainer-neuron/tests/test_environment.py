"""The Neuron variables of a recipe, exactly; and that nothing heavy is imported to make them."""

import subprocess
import sys

import pytest

from lt_trainer.recipe import Recipe, load
from lt_trainer_neuron import SPEC, neuron_env


def recipe(*sets: str) -> Recipe:
    return load(base={"data": {"store": "x"}}, sets=["run.engine=neuron", *sets]).recipe


def test_one_node_with_the_defaults() -> None:
    assert SPEC.env(recipe()) == {
        "MALLOC_ARENA_MAX": "64",
        "NEURON_CC_FLAGS": "--model-type=transformer",
        "NEURON_FUSE_SOFTMAX": "1",
        "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": "3",
        "NEURON_RT_NUM_CORES": "32",
        "NEURON_RT_STOCHASTIC_ROUNDING_EN": "1",
        "NUM_NEURONCORES": "32",
        "TPU_CHIPS_PER_HOST_BOUNDS": "32",
        "TPU_NUM_DEVICES": "32",
        "XLA_USE_BF16": "1",
    }


def test_the_70b_recipe_on_16_nodes() -> None:
    made = recipe(
        "parallel.n_nodes=16",
        "engine.neuron.precision=downcast",
        "engine.neuron.max_inflight=7",
        "engine.neuron.malloc_arenas=128",
        "engine.neuron.compile_cache=s3://bucket/cache",
    )
    assert neuron_env(made) == {
        "FI_EFA_FORK_SAFE": "1",
        "FI_EFA_USE_DEVICE_RDMA": "1",
        "FI_PROVIDER": "efa",
        "MALLOC_ARENA_MAX": "128",
        "NEURON_CC_FLAGS": "--model-type=transformer",
        "NEURON_COMPILE_CACHE_URL": "s3://bucket/cache",
        "NEURON_FUSE_SOFTMAX": "1",
        "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": "7",
        "NEURON_RT_NUM_CORES": "32",
        "NEURON_RT_STOCHASTIC_ROUNDING_EN": "0",
        "NUM_NEURONCORES": "32",
        "TPU_CHIPS_PER_HOST_BOUNDS": "32",
        "TPU_NUM_DEVICES": "32",
        "XLA_DOWNCAST_BF16": "1",
    }


@pytest.mark.parametrize(
    ("precision", "wanted"),
    [
        ("bf16_sr", {"XLA_USE_BF16": "1", "NEURON_RT_STOCHASTIC_ROUNDING_EN": "1"}),
        ("downcast", {"XLA_DOWNCAST_BF16": "1", "NEURON_RT_STOCHASTIC_ROUNDING_EN": "0"}),
        ("fp32_master", {"NEURON_RT_STOCHASTIC_ROUNDING_EN": "0"}),
    ],
)
def test_each_precision_sets_only_its_own_variables(precision: str, wanted: dict[str, str]) -> None:
    names = ("XLA_USE_BF16", "XLA_DOWNCAST_BF16", "NEURON_RT_STOCHASTIC_ROUNDING_EN")
    found = neuron_env(recipe(f"engine.neuron.precision={precision}"))
    assert {name: found[name] for name in names if name in found} == wanted


def test_cores_follow_the_instance() -> None:
    found = neuron_env(recipe("engine.neuron.num_neuroncores=2"))
    assert {found[name] for name in ("NEURON_RT_NUM_CORES", "NUM_NEURONCORES", "TPU_NUM_DEVICES")} == {"2"}


def test_nothing_heavy_is_imported() -> None:
    program = (
        "import sys; from lt_trainer.engine import World; from lt_trainer.recipe import load; import lt_trainer_neuron;"
        "r = load(base={'data': {'store': 'x'}}, sets=['run.engine=neuron', 'batch.micro_batch=1']).recipe;"
        "lt_trainer_neuron.SPEC.check(r, World()); lt_trainer_neuron.SPEC.env(r);"
        "print([m for m in ('torch', 'torch_xla', 'neuronx_distributed', 'numpy', 'typer') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_importing_the_package_loads_no_module_of_it() -> None:
    program = "import sys, lt_trainer_neuron; print([m for m in sys.modules if m.startswith('lt_')])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['lt_trainer_neuron']"
