"""The Neuron variables of a recipe, exactly; and that nothing heavy is imported to make them."""

import subprocess
import sys

import pytest

from lt_trainer.config.recipe import load
from lt_trainer.config.sections import Recipe
from lt_trainer.engine import World
from lt_trainer.errors import RecipeError
from lt_trainer_neuron.environment import check_environment, list_variables, neuron_env
from lt_trainer_neuron.spec import SPEC

ONE_NODE = {
    "MALLOC_ARENA_MAX": "64",
    "NEURON_CC_FLAGS": "--model-type=transformer",
    "NEURON_FUSE_SOFTMAX": "1",
    "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": "3",
    "NEURON_RT_NUM_CORES": "32",
    "NEURON_RT_STOCHASTIC_ROUNDING_EN": "1",
    "NUM_NEURONCORES": "32",
    "TPU_CHIPS_PER_HOST_BOUNDS": "32",
    "TPU_NUM_DEVICES": "32",
    "XLA_DISABLE_FUNCTIONALIZATION": "0",
    "XLA_USE_BF16": "1",
}
SETS_70B = (
    "parallel.n_nodes=16",
    "engine.neuron.precision=downcast",
    "engine.neuron.max_inflight=7",
    "engine.neuron.malloc_arenas=128",
    "engine.neuron.compile_cache=s3://bucket/cache",
)
CHANGED_70B = {
    "FI_EFA_FORK_SAFE": "1",
    "FI_EFA_USE_DEVICE_RDMA": "1",
    "FI_PROVIDER": "efa",
    "MALLOC_ARENA_MAX": "128",
    "NEURON_COMPILE_CACHE_URL": "s3://bucket/cache",
    "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": "7",
    "NEURON_RT_STOCHASTIC_ROUNDING_EN": "0",
    "XLA_DOWNCAST_BF16": "1",
}
TWO_CORES = dict.fromkeys(
    ("NEURON_RT_NUM_CORES", "NUM_NEURONCORES", "TPU_CHIPS_PER_HOST_BOUNDS", "TPU_NUM_DEVICES"), "2"
)


def recipe(*sets: str) -> Recipe:
    return load(base={"data": {"store": "x"}}, overrides=["run.engine=neuron", *sets]).recipe


@pytest.mark.parametrize(
    ("sets", "changed", "absent"),
    [
        ((), {}, ""),
        (SETS_70B, CHANGED_70B, "XLA_USE_BF16"),
        (
            ("engine.neuron.precision=fp32_master_weights",),
            {"NEURON_RT_STOCHASTIC_ROUNDING_EN": "0"},
            "XLA_USE_BF16",
        ),
        (("engine.neuron.num_neuroncores=2",), TWO_CORES, ""),
    ],
)
def test_the_variables_of_a_recipe(sets: tuple[str, ...], changed: dict[str, str], absent: str) -> None:
    wanted = {name: value for name, value in (ONE_NODE | changed).items() if name != absent}
    assert neuron_env(recipe(*sets), {}) == wanted
    check_environment(recipe(*sets), wanted)


def test_every_value_has_a_reason_and_the_users_own_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"MALLOC_ARENA_MAX": "7", "NEURON_FUSE_SOFTMAX": "1", "HOME": "/root"}
    found = {item.name: item for item in list_variables(recipe(), environ=environ)}
    assert all(len(item.reason) > 10 for item in found.values())
    mine = found["MALLOC_ARENA_MAX"]
    assert (mine.value, mine.recipe_value) == ("7", "64")
    assert {name for name, item in found.items() if item.is_overridden} == {"MALLOC_ARENA_MAX"}
    assert "HOME" not in found
    monkeypatch.setenv("NEURON_CC_FLAGS", "--mine")
    assert SPEC.env(recipe())["NEURON_CC_FLAGS"] == "--mine"


@pytest.mark.parametrize(
    ("precision", "name", "value", "refused"),
    [
        ("bf16_sr", "XLA_USE_BF16", "1", False),
        ("bf16_sr", "XLA_USE_BF16", "0", True),
        ("bf16_sr", "XLA_DOWNCAST_BF16", "1", True),
        ("downcast", "XLA_DOWNCAST_BF16", "1", False),
        ("downcast", "XLA_DOWNCAST_BF16", "0", True),
        ("downcast", "XLA_USE_BF16", "1", True),
        ("fp32_master_weights", "XLA_USE_BF16", "1", True),
        ("fp32_master_weights", "XLA_DOWNCAST_BF16", "1", True),
        ("fp32_master_weights", "XLA_DOWNCAST_BF16", "0", False),
    ],
)
def test_what_decides_dtypes_behind_the_recipe_is_refused(
    precision: str, name: str, value: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = recipe("parallel.tp=4", "batch.micro_batch_size=1", f"engine.neuron.precision={precision}")
    SPEC.check(made, World())
    monkeypatch.setenv(name, value)
    if refused:
        with pytest.raises(RecipeError, match=f"{name}={value} .*unset {name}"):
            SPEC.check(made, World())
    else:
        SPEC.check(made, World())


def test_the_cpu_backend_needs_none() -> None:
    assert neuron_env(recipe("engine.neuron.backend=cpu"), {}) == {}
    check_environment(recipe("engine.neuron.backend=cpu"), {"XLA_USE_BF16": "1"})


def test_nothing_heavy_is_imported() -> None:
    program = (
        "import sys; from lt_trainer.engine import World; from lt_trainer.config.recipe import load;"
        "from lt_trainer_neuron.spec import SPEC;"
        "r = load(base={'data': {'store': 'x'}}, overrides=['run.engine=neuron', 'batch.micro_batch_size=1']).recipe;"
        "SPEC.check(r, World()); SPEC.env(r);"
        "print([m for m in ('torch', 'torch_xla', 'neuronx_distributed', 'numpy', 'typer') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
