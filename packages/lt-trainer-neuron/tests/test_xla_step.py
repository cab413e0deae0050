"""The engine on plain torch-xla (PJRT on the CPU, one device): its graphs are counted by torch-xla's own metrics.

What is asserted is what costs hours on Trainium: a graph that is compiled again, an operation that falls back to the
host (counters `aten::`), a value that is fetched while micro-batches are added up. Losses, norms and weights are
compared with the cpu backend, which knows nothing of torch-xla.

The variables that make fp32 tensors bf16 (XLA_USE_BF16, XLA_DOWNCAST_BF16) work on this device too, so each precision
is run with the environment that ranks get; only rounding by chance is the device's own.

Each run is a process of its own: torch-xla's counters and its device are a process's (`xla_step/worker.py`).
"""

import struct
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lt_test_helpers.xla_processes import run_worker

pytestmark = pytest.mark.skipif(find_spec("torch_xla") is None, reason="torch-xla is not installed (extra xla-cpu)")

WORKER = Path(__file__).parent / "xla_step" / "worker.py"
STEPS, MICROS = 5, 3
SETTLED = 2
"""Steps after which nothing is compiled any more."""
LONG = 512
"""Positions beyond those that bf16 can count."""

XLA, CPU = "engine.neuron.backend=xla", "engine.neuron.backend=cpu"
STEP, TIED = "engine.neuron.graph_scope=step", "model.tie_word_embeddings=true"


def named(name: str, *sets: str, broken: int = -1, seq_len: int = 16, told: bool = False) -> dict[str, Any]:
    return {"name": name, "sets": sets, "broken": broken, "seq_len": seq_len, "told": told}


RUNS = [
    named("cpu", CPU),
    named("cpu-tied", CPU, TIED, broken=3),
    named("cpu-long", CPU, seq_len=LONG),
    named("micro-batch", XLA),  # fp32 throughout: the precision's environment is not set
    named("step", XLA, STEP, TIED, broken=3),
    named("fp32_master_weights", XLA, "engine.neuron.precision=fp32_master_weights", STEP, told=True),
    named("downcast", XLA, "engine.neuron.precision=downcast", seq_len=LONG, told=True),
    named("bf16_sr", XLA, "engine.neuron.precision=bf16_sr", seq_len=LONG, told=True),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each run saw, by name."""
    return run_worker(WORKER, tmp_path_factory.mktemp("xla"), RUNS)


def assert_alike(found: Any, wanted: Any) -> None:
    """Losses, norms, weights and moments of two runs, to what fp32 allows."""
    for mine, theirs in zip(found["metrics"], wanted["metrics"], strict=True):
        assert mine == pytest.approx(theirs, rel=3e-6, nan_ok=True)
    assert found["state"].keys() == wanted["state"].keys()
    for name, values in found["state"].items():
        others = wanted["state"][name]
        size = sum(value * value for value in others) ** 0.5
        apart = sum((a - b) ** 2 for a, b in zip(values, others, strict=True)) ** 0.5
        near = 2e-3 if name.startswith("weights") else 2e-5  # the last step goes far, by the signs of small gradients
        assert apart <= near * size, (name, apart / size)
    assert found["small"] == wanted["small"]
    assert found["eval"] == pytest.approx(wanted["eval"], rel=1e-5)


def assert_graphs(found: Any, *, marks: int) -> None:
    """Nothing is compiled once settled; nothing falls back to the host or is fetched in any step."""
    for step, counted in enumerate(found["counted"]):
        fallbacks = {name: n for name, n in counted.items() if name.startswith("aten::") and n}
        assert not fallbacks, (step, fallbacks)
        assert counted["TransferFromDeviceTime"] == 0, step
        assert counted["MarkStep"] == marks, step
        if step >= SETTLED:
            assert counted["UncachedCompile"] == 0, step
            assert counted["CompileTime"] == 0, step


def wide_share(values: list[float]) -> float:
    """The share of numbers that bf16 does not have: of its 8 bits, so the lower half of an fp32 is zero."""
    return sum(struct.unpack("<I", struct.pack("<f", value))[0] % 2**16 != 0 for value in values) / len(values)


def test_micro_batch_graphs_give_what_the_cpu_backend_gives(found: dict[str, Any]) -> None:
    mine = found["micro-batch"]
    assert_graphs(mine, marks=MICROS + 1)
    assert mine["device"][:2] == ["torch-xla on CPU", "cpu"]
    assert mine["device"][2] > 2**20
    assert_alike(mine, found["cpu"])


def test_a_step_is_one_graph_and_a_bad_one_has_no_effect(found: dict[str, Any]) -> None:
    mine = found["step"]
    assert_graphs(mine, marks=1)
    executed = [counted["UncachedCompile"] + counted.get("CachedCompile", 0) for counted in mine["counted"]]
    assert executed == [1] * STEPS
    assert mine["small"] == {"optimizer_step": STEPS - 1}
    assert_alike(mine, found["cpu-tied"])


@pytest.mark.parametrize(
    ("name", "plain", "marks"),
    [("fp32_master_weights", "cpu", 1), ("downcast", "cpu-long", 4), ("bf16_sr", "cpu-long", 4)],
)
def test_each_precision_is_what_it_says_on_graphs_that_stay(
    found: dict[str, Any], name: str, plain: str, marks: int
) -> None:
    mine, exact = found[name], found[plain]
    assert_graphs(mine, marks=marks)
    assert mine["small"] == {"optimizer_step": STEPS}
    near_loss, near_norm = (0.03, 0.15) if name == "bf16_sr" else (0.02, 0.02)  # sums in bf16 lose what is small
    for (loss, norm), (exact_loss, exact_norm) in zip(mine["metrics"], exact["metrics"], strict=True):
        assert loss == pytest.approx(exact_loss, rel=near_loss)
        assert norm == pytest.approx(exact_norm, rel=near_norm)
    kept = mine["state"]["weights model.layers.0.mlp.down_proj.weight"]
    assert wide_share(kept) > 0.9 if name != "bf16_sr" else wide_share(kept) == 0


@pytest.mark.parametrize("name", ["downcast", "bf16_sr"])
def test_rotary_positions_are_told_apart_where_fp32_is_bf16(found: dict[str, Any], name: str) -> None:
    """Angles that the device computed would have 8 bits, at position 511 an error of a radian."""
    assert found[name]["turned"] <= 2**-8
