"""The Neuron variables of a recipe, exactly; and that nothing heavy is imported to make them."""

import json
import subprocess
import sys

import pytest

from lt_trainer.config.recipe import load
from lt_trainer.config.sections import Recipe
from lt_trainer.engine import World
from lt_trainer.errors import RecipeError
from lt_trainer_neuron import SPEC, neuron_env
from lt_trainer_neuron.environment import ENV_RECORD_VARIABLE, build_env, check_environment, list_variables


def recipe(*sets: str) -> Recipe:
    return load(base={"data": {"store": "x"}}, overrides=["run.engine=neuron", *sets]).recipe


def test_one_node_with_the_defaults() -> None:
    assert neuron_env(recipe()) == {
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
        "XLA_DISABLE_FUNCTIONALIZATION": "0",
        "XLA_DOWNCAST_BF16": "1",
    }


@pytest.mark.parametrize(
    ("precision", "wanted"),
    [
        ("bf16_sr", {"XLA_USE_BF16": "1", "NEURON_RT_STOCHASTIC_ROUNDING_EN": "1"}),
        ("downcast", {"XLA_DOWNCAST_BF16": "1", "NEURON_RT_STOCHASTIC_ROUNDING_EN": "0"}),
        ("fp32_master_weights", {"NEURON_RT_STOCHASTIC_ROUNDING_EN": "0"}),
    ],
)
def test_each_precision_sets_only_its_own_variables(precision: str, wanted: dict[str, str]) -> None:
    names = ("XLA_USE_BF16", "XLA_DOWNCAST_BF16", "NEURON_RT_STOCHASTIC_ROUNDING_EN")
    found = neuron_env(recipe(f"engine.neuron.precision={precision}"))
    assert {name: found[name] for name in names if name in found} == wanted


def test_cores_follow_the_instance() -> None:
    found = neuron_env(recipe("engine.neuron.num_neuroncores=2"))
    assert {found[name] for name in ("NEURON_RT_NUM_CORES", "NUM_NEURONCORES", "TPU_NUM_DEVICES")} == {"2"}


def test_every_value_has_a_reason_and_the_persons_own_wins() -> None:
    environ = {"MALLOC_ARENA_MAX": "7", "NEURON_FUSE_SOFTMAX": "1", "HOME": "/root"}
    found = {item.name: item for item in list_variables(recipe(), environ=environ)}
    assert all(len(item.reason) > 10 for item in found.values())
    mine = found["MALLOC_ARENA_MAX"]
    assert (mine.value, mine.recipe_value, mine.is_overridden) == ("7", "64", True)
    assert {name for name, item in found.items() if item.is_overridden} == {"MALLOC_ARENA_MAX"}
    assert "HOME" not in found
    assert neuron_env(recipe(), environ=environ)["MALLOC_ARENA_MAX"] == "7"


def test_what_we_have_set_ourselves_is_not_taken_for_the_persons() -> None:
    """A rank that starts children, or a second run in the same process with another recipe."""
    environ = {"MALLOC_ARENA_MAX": "7"}
    environ |= build_env(recipe("engine.neuron.max_inflight=5", "engine.neuron.precision=downcast"), environ)
    assert set(json.loads(environ[ENV_RECORD_VARIABLE])) == set(environ) - {ENV_RECORD_VARIABLE, "MALLOC_ARENA_MAX"}
    assert environ["NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS"] == "5"
    again = build_env(recipe("engine.neuron.max_inflight=6"), environ)
    assert again["NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS"] == "6"
    assert again["MALLOC_ARENA_MAX"] == "7"
    assert (
        json.loads(again[ENV_RECORD_VARIABLE])["XLA_DOWNCAST_BF16"] == "1"
    )  # of the first run: still there, still ours
    check_environment(recipe(), environ | again)
    changed = environ | {"NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": "9"}  # the person, after us
    assert build_env(recipe(), changed)["NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS"] == "9"
    assert build_env(recipe(), {ENV_RECORD_VARIABLE: "not ours"})["MALLOC_ARENA_MAX"] == "64"


def test_the_spec_reads_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_CC_FLAGS", "--mine")
    assert SPEC.env(recipe())["NEURON_CC_FLAGS"] == "--mine"
    monkeypatch.setenv("XLA_USE_BF16", "1")
    fp32 = recipe("parallel.tp=4", "batch.micro_batch_size=1", "engine.neuron.precision=fp32_master_weights")
    with pytest.raises(RecipeError, match="XLA_USE_BF16=1 makes every fp32 tensor bfloat16"):
        SPEC.check(fp32, World())


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
def test_what_decides_dtypes_behind_the_recipe_is_refused(precision: str, name: str, value: str, refused: bool) -> None:
    made = recipe(f"engine.neuron.precision={precision}")
    check_environment(made, {})
    check_environment(made, build_env(made, {}))
    if refused:
        with pytest.raises(RecipeError, match=f"unset {name}"):
            check_environment(made, {name: value})
    else:
        check_environment(made, {name: value})


def test_the_cpu_backend_needs_none() -> None:
    assert neuron_env(recipe("engine.neuron.backend=cpu")) == {}
    check_environment(recipe("engine.neuron.backend=cpu"), {"XLA_USE_BF16": "1"})


def test_nothing_heavy_is_imported() -> None:
    program = (
        "import sys; from lt_trainer.engine import World; from lt_trainer.config.recipe import load;"
        "import lt_trainer_neuron;"
        "r = load(base={'data': {'store': 'x'}}, overrides=['run.engine=neuron', 'batch.micro_batch_size=1']).recipe;"
        "lt_trainer_neuron.SPEC.check(r, World()); lt_trainer_neuron.SPEC.env(r);"
        "print([m for m in ('torch', 'torch_xla', 'neuronx_distributed', 'numpy', 'typer') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_importing_the_package_loads_no_module_of_it() -> None:
    program = "import sys, lt_trainer_neuron; print([m for m in sys.modules if m.startswith('lt_')])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['lt_trainer_neuron']"
