"""The profiler's windows, memory histories, the flight recorder, HFU's factor and the stopwatch of a real engine."""

import gzip
import json
import mmap
import os
import pickle
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lt_model import ModelConfig, flops_per_token
from lt_model.costs import recomputed_flops_per_token
from lt_model.decoder import Decoder
from lt_trainer.config.sections import MetricsOptions
from lt_trainer.engine import STEP_PARTS
from lt_trainer_gpu import flight_recorder
from lt_trainer_gpu.activation_checkpointing import apply_activation_checkpointing
from lt_trainer_gpu.spec import ALLOCATOR_VARIABLES, SPEC
from lt_trainer_gpu.step_profiler import StepProfiler
from lt_trainer_gpu.timing import create_stopwatch

CPU = torch.device("cpu")
LITTLE = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    n_heads=4,
    n_kv_heads=2,
    n_layers=2,
    max_position_embeddings=24,
)


def instruments(out: Path, rank: int = 0, **options: object) -> StepProfiler:
    return StepProfiler(MetricsOptions(**options), run_dir=out, rank=rank, device=CPU)  # type: ignore[arg-type]


def train(made: StepProfiler, steps: int) -> dict[int, list[Path]]:
    """Steps whose matrix products have the step's number in their shape; what was finished before each."""
    finished = {}
    for step in range(1, steps + 1):
        finished[step] = made.on_step_begin(step)
        torch.ones(2, 100 + step) @ torch.ones(100 + step, 3)
    finished[steps + 1] = made.on_step_begin(steps + 1)
    return {step: paths for step, paths in finished.items() if paths}


def widths(path: Path) -> set[int]:
    """The inner sizes of the matrix products in a trace."""
    with gzip.open(path, "rt") as file:
        trace = json.load(file)
    products = [event for event in trace["traceEvents"] if event.get("name") == "aten::mm"]
    return {event["args"]["Input Dims"][0][1] for event in products}


# ---- the profiler ----


def test_a_window_shows_its_steps_and_no_others(tmp_path: Path) -> None:
    """Also one that ends with the run."""
    finished = train(instruments(tmp_path, rank=1, profile_steps=2, profile_start_step=3, profile_ranks=(1,)), 4)
    path = tmp_path / "profile" / "steps-00000003-00000004-rank00001.json.gz"
    assert finished == {5: [path]}
    assert widths(path) == {103, 104}
    assert [found.name for found in path.parent.iterdir()] == [path.name]


def test_other_ranks_and_other_runs_are_not_profiled(tmp_path: Path) -> None:
    assert train(instruments(tmp_path, rank=1, profile_steps=1, profile_start_step=2), 3) == {}
    assert train(instruments(tmp_path), 3) == {}
    assert list(tmp_path.iterdir()) == []


def test_steps_that_are_done_again_are_not_profiled_again(tmp_path: Path) -> None:
    made = instruments(tmp_path, profile_steps=1, profile_start_step=2)
    assert list(train(made, 4)) == [3]
    assert train(made, 4) == {}


# ---- memory ----


@pytest.mark.gpu
def test_a_memory_history_is_written_after_its_step_and_when_memory_is_exhausted(
    tmp_path: Path, cuda: torch.device
) -> None:
    options = MetricsOptions(memory_snapshot_step=1, memory_snapshot_on_oom=True)
    made = StepProfiler(options, run_dir=tmp_path, rank=0, device=cuda)
    assert made.on_step_begin(1) == []
    held = torch.ones(1 << 20, device=cuda)
    (path,) = made.on_step_begin(2)
    assert made.on_step_begin(3) == []
    sizes = [entry["size"] for trace in pickle.loads(path.read_bytes())["device_traces"] for entry in trace]
    assert held.nbytes in sizes
    made.on_out_of_memory()
    assert (tmp_path / "memory" / "out-of-memory-rank00000.pickle").exists()


# ---- the flight recorder ----


def test_variables_leave_what_the_person_has_set(tmp_path: Path) -> None:
    found = flight_recorder.env_variables(tmp_path, {"TORCH_FR_BUFFER_SIZE": "7"})
    assert found == {"TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/collectives_rank_", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    assert (
        flight_recorder.env_variables(Path("x"), {})["TORCH_FR_DUMP_TEMP_FILE"] == f"{os.getcwd()}/x/collectives_rank_"
    )


def test_torch_knows_the_variables() -> None:
    folder = Path(torch.__file__).parent / "lib"
    libraries = [path for path in folder.glob("libtorch*") if path.suffix in (".so", ".dylib")]
    missing = set(flight_recorder.env_variables(Path("x"), {}))
    for path in sorted(libraries, key=lambda path: path.stat().st_size):
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            missing = {name for name in missing if content.find(name.encode()) < 0}
        if not missing:
            break
    assert missing == set()


def test_the_engine_sets_them_and_the_dump_goes_to_the_run_directory(recipe, tmp_path: Path, monkeypatch) -> None:
    for name in [name for name in os.environ if name.startswith("TORCH_FR_")]:
        monkeypatch.delenv(name)  # of a run that this process has had before
    made = recipe(f"run.dir={tmp_path}/run")
    assert SPEC.env(made)["TORCH_FR_DUMP_TEMP_FILE"] == f"{tmp_path}/run/logs/collectives_rank_"
    assert "memory_snapshot" in SPEC.capabilities
    assert "profile" in SPEC.capabilities


@pytest.mark.parametrize(
    ("device", "given", "wanted"),
    [("auto", {}, True), ("cuda", {}, True), ("cpu", {}, False)]
    + [("cuda", {name: "max_split_size_mb:512"}, False) for name in ALLOCATOR_VARIABLES],
)
def test_segments_of_gpu_memory_expand_unless_the_user_says_otherwise(
    recipe, monkeypatch, device, given, wanted
) -> None:
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    asked = SPEC.env(recipe(f"engine.gpu.device={device}"))
    assert asked.get(ALLOCATOR_VARIABLES[0]) == ("expandable_segments:True" if wanted else None)


def test_a_dump_has_the_last_collectives(open_on, tmp_path: Path) -> None:
    engine = open_on("cpu", LITTLE)
    torch.distributed.all_reduce(torch.ones(17))
    path = tmp_path / "flight" / "abc" / "rank_0"
    assert engine.dump_debug_info(path.parent) == f"the last collectives of this rank are in {path}"
    entry = pickle.loads(path.read_bytes())["entries"][-1]
    assert (entry["profiling_name"], entry["input_sizes"]) == ("gloo:all_reduce", [[17]])


def test_the_dump_of_a_gpu_is_that_of_nccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's recorder, simulated; the longest dump is the one that is not empty."""
    trace = pickle.dumps({"version": "2.10", "entries": [{"record_id": n} for n in range(999)]})
    monkeypatch.setattr("torch._C._distributed_c10d._dump_nccl_trace", lambda: trace, raising=False)
    said = flight_recorder.dump(tmp_path, rank=5, on_gpu=True)
    assert (tmp_path / "rank_5").read_bytes() == trace
    assert f"`python -m torch.distributed.flight_recorder.fr_trace {tmp_path} -p rank_` shows where" in said


# ---- HFU ----


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_what_is_computed_again_is_what_torch_counts(mode: str) -> None:
    def two_products(q_BHTD: torch.Size, k_BHSD: torch.Size, *_args: object, **_kwargs: object) -> int:
        return 4 * q_BHTD.numel() * k_BHSD[2]

    # torch 2.11 does not count its attention on CPUs, the newest does.
    attention = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: two_products}

    def counted(checkpointing: str) -> int:
        model = Decoder(LITTLE, attention="sdpa")
        if checkpointing != "none":
            apply_activation_checkpointing(model, checkpointing)
        ids, positions = torch.zeros(2, 16, dtype=torch.int64), torch.arange(16).repeat(2, 1)
        with FlopCounterMode(display=False, custom_mapping=attention) as counter:
            model(ids, position_ids_BT=positions, doc_ids_BT=None, labels_BT=ids).backward()
        return counter.get_total_flops()

    again = recomputed_flops_per_token(LITTLE, 16, mode)
    assert counted(mode) - counted("none") == 2 * 16 * again > 0
    assert again < flops_per_token(LITTLE, 16, "full") / 3


# ---- the stopwatch ----


class SimulatedEvent:
    """An event of CUDA's, reached when it is recorded; as CUDA's, it tells no times unless it was made for that."""

    made = 0
    now_ms = 0.0

    def __init__(self, enable_timing: bool = False) -> None:
        type(self).made += 1
        self._enable_timing, self.reached_ms = enable_timing, 0.0

    def record(self) -> None:
        self.reached_ms = self.now_ms

    def elapsed_time(self, end: "SimulatedEvent") -> float:
        if not (self._enable_timing and end._enable_timing):
            raise ValueError("both events must be created with argument 'enable_timing=True'")
        return end.reached_ms - self.reached_ms


def test_the_times_of_a_gpus_stream_are_those_of_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA simulated; a long run does not make ever more events."""
    monkeypatch.setattr(torch.cuda, "Event", SimulatedEvent)
    monkeypatch.setattr(SimulatedEvent, "made", 0)
    monkeypatch.setattr(SimulatedEvent, "now_ms", 0.0)
    stopwatch = create_stopwatch(torch.device("cuda"))
    for _ in range(50):
        for part, milliseconds in (("data", 250.0), ("rest", 500.0), ("data", 125.0)):
            stopwatch.begin(part)
            SimulatedEvent.now_ms += milliseconds
        stopwatch.begin("rest")
        assert stopwatch.pop_times() == dict.fromkeys(STEP_PARTS, 0.0) | {"data": 0.375, "rest": 0.5}
    assert SimulatedEvent.made <= 6


def test_a_step_is_told_apart_and_the_parts_fill_the_time(device: str, open_on, batches) -> None:
    engine = open_on(device, LITTLE)
    (batch,) = batches(1, n_micro=2, micro_batch_size=2)
    engine.fetch_metrics([engine.step(batch, 0.1)])
    engine.stopwatch.begin("rest")
    engine.fetch_metrics([engine.step(batch, 0.1)])
    engine.stopwatch.pop_times()
    engine.stopwatch.begin("data")
    pending = engine.step(batch, 0.1)
    engine.stopwatch.begin("rest")
    engine.fetch_metrics([pending])
    times = engine.stopwatch.pop_times()
    assert set(times) == set(STEP_PARTS)
    assert times["forward_backward"] > times["data"] >= 0
    assert times["optimizer"] > 0
    assert times["checkpoint"] == times["validation"] == 0
