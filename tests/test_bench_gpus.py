"""The benchmark of layouts tries itself on CPU ranks: what equals one device and what does not, and speed."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lt_test_helpers.pool import RankPool
from lt_trainer.config.recipe import load
from lt_trainer.engine import World
from lt_trainer.training.benchmark import resolve_bench_recipe
from lt_trainer_gpu.spec import SPEC

BENCH = Path(__file__).parent.parent / "tools" / "bench"


@pytest.fixture(scope="module", autouse=True)
def modules() -> Iterator[None]:
    """tools/bench on the path, as its scripts have it."""
    sys.path.insert(0, str(BENCH))
    yield
    sys.path.remove(str(BENCH))


@pytest.fixture(scope="module")
def ranks() -> RankPool:
    return RankPool(4, preload=("lt_trainer_gpu.engine", "lt_trainer_gpu.parallelize"))


def run_rank(folder: str) -> None:
    sys.path.insert(0, str(BENCH))
    import torch

    torch.set_num_threads(1)
    importlib.import_module("gpus_worker").run_rank(Path(folder))


@pytest.fixture(scope="module")
def train(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory):
    """Trains a layout in forked ranks, as torchrun does; returns its result and folder, and remembers them."""
    layouts, done = importlib.import_module("gpus_layouts"), {}

    def trained(layout: Any, dtype: str) -> tuple[dict[str, Any], Path]:
        if (layout, dtype) not in done:
            folder = tmp_path_factory.mktemp(layout.name)
            spec = layouts.layout_spec(layout, dtype, "cpu", quick=True)
            (folder / "spec.json").write_text(json.dumps(spec))
            ranks.run(run_rank, str(folder), ranks=layout.ranks)
            done[layout, dtype] = json.loads((folder / "result.json").read_text()), folder
        return done[layout, dtype]

    return trained


def compare(train, layout: Any, dtype: str) -> dict[str, Any]:
    """A layout beside one device."""
    layouts, module = importlib.import_module("gpus_layouts"), importlib.import_module("gpus_compare")
    found, one = train(layout, dtype), train(layouts.reference_of(layout), dtype)
    return module.compare_layout(*found, layout.ranks, *one, layouts.TOLERANCES[dtype])


@pytest.mark.slow
def test_a_layout_equals_one_device(train) -> None:
    layouts = importlib.import_module("gpus_layouts")
    found = compare(train, layouts.Layout(name="tp-sp", ranks=2, sets=layouts.SP), "float32")
    assert found["equal"], found
    assert found["errors"].keys() == found["tolerance"].keys() == {"loss", "grad_norm", "gradient", "weights"}


def test_a_run_that_trains_otherwise_is_noticed(train) -> None:
    """`reference_of` keeps what names the optimizer, so these differ from their reference by something else."""
    layouts = importlib.import_module("gpus_layouts")
    angles = compare(train, layouts.Layout(name="angles", ranks=1, sets=("model.rope_theta=5000.0",)), "float32")
    assert not angles["equal"]
    assert not angles["different_at_start"]
    assert angles["errors"]["gradient"] > angles["tolerance"]["gradient"]
    other = compare(train, layouts.Layout(name="seed", ranks=1, sets=("run.seed=1",)), "float32")
    assert not other["equal"]
    assert "weights/model.embed_tokens.weight" in other["different_at_start"]


def test_speed_is_measured_under_torchrun_with_the_memory_of_the_fullest_rank(tmp_path: Path) -> None:
    out = tmp_path / "gpus.json"
    command = [sys.executable, str(BENCH / "gpus.py"), "--device", "cpu", "--quick", "--gpus", "2", "--out", str(out)]
    done = subprocess.run(
        [*command, "--stage", "speed-tiny", "--layout", "fsdp-2"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found == json.loads(done.stdout.splitlines()[-1])
    (row,) = found["rows"]
    assert (row["stage"], row["case"], row["status"], row["ranks"]) == ("speed-tiny", "fsdp-2", "ok", 2)
    assert row["layout"]["world"] == 2
    assert row["tokens_per_s_per_device"] == row["tokens_per_s"] / 2
    assert row["memory"]["peak_bytes"] > row["memory"]["state_bytes"]


def test_sizes_that_do_not_fit_by_the_plan_are_not_tried() -> None:
    layouts = importlib.import_module("gpus_layouts")
    case = layouts.SPEED_CASES["8b"]
    fsdp = {layout.name: layout for layout in layouts.speed_layouts(8)}
    assert len(fsdp) == len(layouts.speed_layouts(8))
    small = layouts.speed_tries(case, fsdp["fsdp-8"], "cuda", 80 * 2**30)
    assert 0 < len(small) <= len(layouts.speed_tries(case, fsdp["fsdp-8"], "cuda", 141 * 2**30)) <= len(case.sizes)
    (last,) = layouts.speed_tries(case, fsdp["fsdp-1"], "cuda", 80 * 2**30)
    assert "engine.gpu.activation_checkpointing=full" in last


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_no_recipe_of_a_stage_is_refused(devices: int) -> None:
    layouts = importlib.import_module("gpus_layouts")

    def check(recipe: Any, layout: Any) -> None:
        SPEC.check(recipe, World(size=layout.ranks, local_size=layout.ranks))

    for layout in layouts.LAYOUTS:
        spec = layouts.layout_spec(layout, "float32", "cuda", quick=False)
        check(load(base=spec["base"], overrides=spec["sets"]).recipe, layout)
    for case in layouts.SPEED_CASES.values():
        for layout in layouts.speed_layouts(devices):
            for sets in layouts.speed_tries(case, layout, "cuda", None):
                check(resolve_bench_recipe(None, case.preset, overrides=sets, hyperparameters=None).recipe, layout)


def test_a_layout_that_differs_or_crashes_is_a_failure() -> None:
    gpus = importlib.import_module("gpus")
    assert [gpus.is_failure(row) for row in ({"status": "ok", "equal": True}, {"status": "out_of_memory"})] == [0, 0]
    assert [gpus.is_failure(row) for row in ({"status": "ok", "equal": False}, {"status": "timed_out"})] == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_every_layout_of_four_ranks_equals_one_device(train, dtype: str) -> None:
    layouts = importlib.import_module("gpus_layouts")
    found = {layout.name: compare(train, layout, dtype) for layout in layouts.LAYOUTS if layout.ranks <= 4}
    assert not {name: result for name, result in found.items() if not result["equal"]}
