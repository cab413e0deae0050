"""Children of gpu.py: facts of the device, products, steps of the engine or of plain torch, loss curves.

    python tools/bench/gpu_worker.py FOLDER        # reads spec.json with its `kind`, writes result.json

Each runs in a process of its own, so that running out of memory or crashing ends nothing else and all memory is freed.
On a CPU the same code runs with another clock, without sensors and without counts of allocated bytes. Loss curves are
of a Markov chain of 256 ids with 4 successors each: the loss falls from ln(vocabulary) towards ln 4, and curves of
several seeds show what is noise.
"""

from __future__ import annotations

import csv
import importlib
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lt_model import flops_per_token, n_parameters, preset
from lt_model.costs import FLOPS_CONVENTIONS
from lt_trainer.config.recipe import load, model_config
from lt_trainer.engine import World
from lt_trainer.planning.layout import layout_from_recipe
from lt_trainer.planning.memory import plan_memory
from lt_trainer.tuning.probe import OUT_OF_MEMORY
from lt_trainer_gpu.spec import SPEC

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "helpers"))

if TYPE_CHECKING:
    import torch

    from lt_model import ModelConfig
    from lt_trainer.engine import StepBatch

EXIT_MARGIN_S = 10.0
"""Seconds of a child's time that are kept for what comes after the timed steps."""
WARMUP_MATMULS, TIMED_MATMULS = 3, 30
N_IDS, N_SUCCESSORS = 256, 4
CURVE_LEARNING_RATE, CURVE_WARMUP_STEPS = 3e-4, 20
SENSORS = {"power_w": "power.draw", "sm_clock_mhz": "clocks.sm", "temperature_c": "temperature.gpu"}


def select_device(spec: dict[str, Any]) -> torch.device:
    """Return the requested device; exit if it is not available."""
    import torch

    if spec["device"] == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device cuda: torch finds no CUDA device; --device cpu --quick tries the script on a CPU")
    return torch.device(spec["device"], 0) if spec["device"] == "cuda" else torch.device("cpu")


def limit_memory(device: torch.device, gib: float) -> None:
    """Limit the device memory of this process; on a CPU, the growth of its address space."""
    import torch

    if gib and device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, gib * 2**30 / total), device)
    elif gib:
        now = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + int(gib * 2**30), resource.RLIM_INFINITY))


# --- Clocks and sensors ---------------------------------------------------------------------------------------------


def query_gpu(field: str) -> str | None:
    """Return what nvidia-smi says of the first GPU, or None without it."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=30).stdout.partition("\n")[0]


class GpuMonitor:
    """Power, clock and temperature every 200 ms while the context is open, where nvidia-smi is; then `stats`."""

    def __init__(self, kind: str) -> None:
        self._is_wanted = kind == "cuda" and shutil.which("nvidia-smi") is not None
        self.stats: dict[str, dict[str, float]] | None = None

    def __enter__(self) -> GpuMonitor:
        self._file = tempfile.TemporaryFile("w+")
        if self._is_wanted:
            query = ["-i", "0", f"--query-gpu={','.join(SENSORS.values())}", "--format=csv,noheader,nounits"]
            self._process = subprocess.Popen(["nvidia-smi", *query, "-lms", "200"], stdout=self._file)
        return self

    def __exit__(self, *error: object) -> None:
        samples = []
        if self._is_wanted:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=10)
            self._file.seek(0)
            for row in csv.reader(self._file):
                with suppress(ValueError):  # cut short, or a field that the card lacks
                    samples.append(dict(zip(SENSORS, map(float, row), strict=True)))
        self._file.close()
        if samples:
            columns = {name: [sample[name] for sample in samples] for name in SENSORS}
            self.stats = {name: {"median": statistics.median(v), "max": max(v)} for name, v in columns.items()}


class StepTimer:
    """Timer of steps: CUDA events, which the host does not wait for, or perf_counter on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ticks: list[Any] = []

    def record(self) -> None:
        """Record a point in time."""
        import torch

        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._ticks.append(event)
        else:
            self._ticks.append(time.perf_counter())

    def elapsed_seconds(self) -> list[float]:
        """Return the seconds between consecutive points, after waiting for the last."""
        synchronize(self._device)
        pairs = zip(self._ticks, self._ticks[1:], strict=False)
        if self._device.type == "cuda":
            return [before.elapsed_time(after) / 1000 for before, after in pairs]
        return [after - before for before, after in pairs]


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_call(device: torch.device, call: Callable[[], Any]) -> tuple[float, Any]:
    """Time `call` with the device idle before and after; return the seconds and the result."""
    synchronize(device)
    start = time.perf_counter()
    result = call()
    synchronize(device)
    return time.perf_counter() - start, result


# --- The children ---------------------------------------------------------------------------------------------------


def read_facts(spec: dict[str, Any]) -> dict[str, Any]:
    """Return versions and sizes of the device."""
    facts: dict[str, Any] = {
        "status": "ok",
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_cores": os.cpu_count(),
        "driver": query_gpu("driver_version"),
        "torch": version("torch"),
        "cuda": None,
        "device": spec["device"],
        "devices": 1,
    }
    if spec["device"] == "cpu":
        return facts
    import torch
    from torch.cuda import nccl

    found = torch.cuda.get_device_properties(select_device(spec))
    return facts | {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": found.name,
        "devices": torch.cuda.device_count(),
        "memory_bytes": found.total_memory,
        "compute_capability": f"{found.major}.{found.minor}",
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, nccl.version())),
        "power_limit": query_gpu("power.limit"),
    }


def time_products(spec: dict[str, Any]) -> dict[str, Any]:
    """Time each product of `spec["shapes"]`, bfloat16 (float32 on a CPU) numbers from a normal distribution."""
    import torch

    device = select_device(spec)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    products = []
    for m, k, n in spec["shapes"]:
        a = torch.randn(m, k, device=device, dtype=dtype)
        b = torch.randn(k, n, device=device, dtype=dtype)
        out = torch.empty(m, n, device=device, dtype=dtype)
        for _ in range(WARMUP_MATMULS):
            torch.mm(a, b, out=out)
        synchronize(device)
        ticks = StepTimer(device)
        ticks.record()
        for _ in range(TIMED_MATMULS):
            torch.mm(a, b, out=out)
            ticks.record()
        seconds = ticks.elapsed_seconds()
        speeds = {"best": min(seconds), "median": statistics.median(seconds)}
        flops_per_s = {f"{name}_flops_per_s": 2 * m * k * n / value for name, value in speeds.items()}
        products.append({"m": m, "k": k, "n": n, "dtype": str(dtype).removeprefix("torch."), **flops_per_s})
    return {"status": "ok", "products": products}


def prepare_recipe(spec: dict[str, Any]) -> tuple[Any, ModelConfig]:
    """Return recipe and model of a step of one micro-batch of `spec`; set the engine's environment variables."""
    model = {"preset": spec["preset"]} | ({"n_layers": spec["n_layers"]} if spec["n_layers"] else {})
    base = {
        "model": model,
        "data": {"store": "random ids", "seq_len": spec["seq_len"]},
        "batch": {"global_batch_size": spec["micro_batch_size"], "micro_batch_size": spec["micro_batch_size"]},
        "engine": {"gpu": {"device": spec["device"]}},
    }
    recipe = load(base=base, overrides=spec["sets"], base_name="benchmark").recipe
    SPEC.check(recipe, World())
    os.environ.update(SPEC.env(recipe))
    return recipe, model_config(recipe, preset(spec["preset"]).vocab_size)


def random_ids(spec: dict[str, Any], vocab_size: int, seed: int) -> np.ndarray:
    """Return uniformly random ids [1, rows, seq_len + 1]; never zeros, on which products run faster."""
    shape = (1, spec["micro_batch_size"], spec["seq_len"] + 1)
    return np.random.default_rng(seed).integers(0, vocab_size, shape, dtype=np.int32)


def chain_ids(spec: dict[str, Any], seed: int) -> np.ndarray:
    """Return ids [1, rows, seq_len + 1] of the Markov chain."""
    successors = np.random.default_rng(0).integers(0, N_IDS, (N_IDS, N_SUCCESSORS), dtype=np.int32)
    choices = random_ids(spec, N_SUCCESSORS, seed)
    ids = random_ids(spec, N_IDS, seed + 1)
    for at in range(1, ids.shape[-1]):
        ids[..., at] = successors[ids[..., at - 1], choices[..., at]]
    return ids


def batch_of_rows(ids: np.ndarray, document_tokens: int) -> StepBatch:
    """Return a step of one micro-batch from ids [1, rows, seq_len + 1], every position with a label.

    Args:
        ids: Token ids.
        document_tokens: Tokens of a document; 0 for rows of one document.
    """
    from lt_test_helpers.layouts import step_batch

    shape = (1, ids.shape[1], ids.shape[2] - 1)
    counting = np.arange(shape[2], dtype=np.int32)
    length = document_tokens or shape[2]
    return step_batch(
        input_ids=np.ascontiguousarray(ids[..., :-1]),
        labels=np.ascontiguousarray(ids[..., 1:]),
        position_ids=np.broadcast_to(counting % length, shape).copy(),
        doc_ids=np.broadcast_to(counting // length, shape).copy(),
        valid_tokens=shape[1] * shape[2],
    )


def measure_losses(spec: dict[str, Any]) -> dict[str, Any]:
    """Train from the weights of `curve_seed`; return the losses of all steps and the mean of the last tenth."""
    seed = spec["curve_seed"]
    recipe, config = prepare_recipe(spec | {"sets": [*spec["sets"], f"run.seed={seed}"]})
    engine = SPEC.open(recipe, config, World())
    pendings = []
    for step in range(spec["curve_steps"]):
        lr = CURVE_LEARNING_RATE * min(1, (step + 1) / CURVE_WARMUP_STEPS)
        pendings.append(engine.step(batch_of_rows(chain_ids(spec, seed * 2**20 + 2 * step), 0), lr))
    losses = [metrics.loss for metrics in engine.fetch_metrics(pendings)]
    resolved = dict(engine.device.resolved)
    engine.close()
    tail = losses[-max(1, len(losses) // 10) :]
    return {"status": "ok", "resolved": resolved, "tail": sum(tail) / len(tail), "losses": losses}


def measure_steps(spec: dict[str, Any]) -> dict[str, Any]:
    """Open the engine, or with `plain` the model of torch alone, and time its steps; or tell where memory ran out."""
    recipe, config = prepare_recipe(spec)  # sets the allocator's variables before torch is loaded
    device, stages = select_device(spec), ["opening"]
    for name in ("lt_trainer_gpu.engine", "lt_trainer_gpu.parallelize", "torch._dynamo"):
        importlib.import_module(name)  # so that opening is timed without them
    limit_memory(device, spec["memory_limit_gib"])
    try:
        opened = open_plain if spec["plain"] else open_engine
        open_s, (step, finish) = time_call(device, lambda: opened(spec, recipe, config, device))
        timed = time_steps(spec, device, stages, open_s, step)
        found = finish(timed.pop("pendings"))
        return {"open_s": open_s} | timed | found | measure_size(spec, recipe, config, timed)
    except (RuntimeError, MemoryError) as error:
        message = str(error) or type(error).__name__
        if not OUT_OF_MEMORY.search(f"{type(error).__name__} {message}"):
            raise
        return {"status": "out_of_memory", "during": stages[-1], "message": message[:600]}


Opened = tuple[Callable[[int], Any], Callable[[list[Any]], dict[str, Any]]]
"""A step with the rows of a seed, and what is told of the results of all steps at the end."""


def open_engine(spec: dict[str, Any], recipe: Any, config: ModelConfig, device: torch.device) -> Opened:
    """Open the engine, with batches of random ids."""
    engine = SPEC.open(recipe, config, World())
    batches = [
        batch_of_rows(random_ids(spec, config.vocab_size, seed), spec["document_tokens"])
        for seed in range(spec["warmup"] + spec["steps"])
    ]

    def finish(pendings: list[Any]) -> dict[str, Any]:
        losses = [metrics.loss for metrics in engine.fetch_metrics(pendings)]
        found = {
            "resolved": dict(engine.device.resolved),
            "notes": list(engine.device.notes),
            "peaks": {"engine": {"flops_per_s": engine.device.peak_flops, "source": engine.device.peak_source}},
            "state_bytes": engine.state_bytes(),
            "loss": {"first": losses[0], "last": losses[-1]},
        }
        engine.close()
        return found

    return lambda seed: engine.step(batches[seed], recipe.optimizer.lr / 100), finish


def open_plain(spec: dict[str, Any], recipe: Any, config: ModelConfig, device: torch.device) -> Opened:
    """Open the plain model, with the same ids."""
    import torch
    from gpu_plain import PlainTrainer

    trainer = PlainTrainer(config, device, is_compiled=spec["plain"] == "compiled")
    ids = [
        torch.from_numpy(random_ids(spec, config.vocab_size, seed)[0]).to(device, torch.int64)
        for seed in range(spec["warmup"] + spec["steps"])
    ]

    def finish(losses: list[Any]) -> dict[str, Any]:
        trainer.close()
        return {"loss": {"first": losses[0].item(), "last": losses[-1].item()}}

    return lambda seed: trainer.step(ids[seed]), finish


def time_steps(
    spec: dict[str, Any], device: torch.device, stages: list[str], open_s: float, step: Callable[[int], Any]
) -> dict[str, Any]:
    """Call `step` with seeds 0, 1, ... to warm up, then timed; return its results in `pendings`, and the times."""
    begin, warmup = time.monotonic(), spec["warmup"]
    stages.append("the first step")
    first_step_s, first = time_call(device, lambda: step(0))
    stages.append("warming up")
    warm_s, warm = time_call(device, lambda: [step(seed) for seed in range(1, warmup)])
    one_s = warm_s / len(warm) if warm else first_step_s
    left_s = spec["limit_s"] - open_s - (time.monotonic() - begin) - EXIT_MARGIN_S
    n_timed = min(spec["steps"], max(int(left_s / one_s), 3))

    stages.append("the timed steps")
    ticks, pendings = StepTimer(device), []
    with GpuMonitor(device.type) as monitor:
        start = time.perf_counter()
        ticks.record()
        for seed in range(warmup, warmup + n_timed):
            pendings.append(step(seed))
            ticks.record()
        step_s = ticks.elapsed_seconds()
        wall_s = time.perf_counter() - start
    return {
        "status": "ok",
        "pendings": [first, *warm, *pendings],
        "first_step_s": first_step_s,
        "step_s": {"median": statistics.median(step_s), "min": min(step_s), "max": max(step_s), "all": step_s},
        "wall_s_per_step": wall_s / n_timed,
        "power": monitor.stats,
    }


def measure_size(spec: dict[str, Any], recipe: Any, config: ModelConfig, timed: dict[str, Any]) -> dict[str, Any]:
    """Return tokens and FLOPs per second in both conventions, and the peak memory beside that of `lt train plan`."""
    import torch

    tokens = spec["micro_batch_size"] * spec["seq_len"]
    tokens_per_s = tokens / timed["step_s"]["median"]
    flops = {convention: flops_per_token(config, spec["seq_len"], convention) for convention in FLOPS_CONVENTIONS}
    plan = plan_memory(config, recipe.data.seq_len, layout_from_recipe(recipe, devices=1, nodes=1))
    memory = {"planned_bytes": plan.peak}
    memory["peak_resident_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if spec["device"] == "cuda":
        memory["peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
        memory["peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
    return {
        "parameters": n_parameters(config),
        "n_layers": config.n_layers,
        "tokens_per_s": tokens_per_s,
        "flops_per_s": {convention: count * tokens_per_s for convention, count in flops.items()},
        "memory": memory,
    }


CHILDREN = {"facts": read_facts, "matmul": time_products, "steps": measure_steps, "losses": measure_losses}

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    given = json.loads((folder / "spec.json").read_text())
    (folder / "result.json").write_text(json.dumps(CHILDREN[given["kind"]](given)))
