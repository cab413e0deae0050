"""Subprocesses of gpu.py: device information, matrix products, the steps of one model.

Each function takes the values of one JSON and returns those of another. Torch is imported inside, because gpu.py itself
must not use a device. On a CPU the same code runs with another clock and without counts of allocated bytes.
"""

from __future__ import annotations

import csv
import importlib
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
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

    from lt_model import LlamaConfig
    from lt_trainer.config import Recipe
    from lt_trainer.engine import StepBatch

T = TypeVar("T")

OPENING_STAGE = "opening the engine"
EXIT_MARGIN_S = 10.0
"""Seconds of a child's time that are kept for what comes after the timed steps."""
WARMUP_MATMULS, TIMED_MATMULS = 3, 30
GPU_QUERY_FIELDS = ("power.draw", "clocks.sm", "temperature.gpu")
OUT_OF_MEMORY_MESSAGES = ("out of memory", "alloc_failed", "can't allocate memory", "cannot allocate memory")
"""What torch, cuBLAS and the CPU's allocator say; not all of them raise torch.OutOfMemoryError."""


def gpu_query(fields: str) -> str | None:
    """Return the first line of nvidia-smi's output, or None without it."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else None


class GpuMonitor:
    """Sampler of power, clock and temperature every 200 ms, if nvidia-smi is installed; does not disturb the host."""

    def __init__(self, kind: str) -> None:
        self._wanted = kind == "cuda" and shutil.which("nvidia-smi") is not None

    def __enter__(self) -> GpuMonitor:
        self._file = tempfile.TemporaryFile("w+")
        query = ["-i", "0", f"--query-gpu={','.join(GPU_QUERY_FIELDS)}", "--format=csv,noheader,nounits", "-lms", "200"]
        self._process = (
            subprocess.Popen(["nvidia-smi", *query], stdout=self._file, stderr=subprocess.DEVNULL)
            if self._wanted
            else None
        )
        return self

    def __exit__(self, *error: object) -> None:
        self.stats: dict[str, Any] | None = None
        if self._process is not None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=10)
            self._file.seek(0)
            self.stats = summarize_samples(list(csv.reader(self._file)))
        self._file.close()


def summarize_samples(rows: list[list[str]]) -> dict[str, Any] | None:
    """Return median and maximum of each column of `GPU_QUERY_FIELDS`; invalid lines are skipped."""
    samples = []
    for row in rows:
        try:
            values = [float(text) for text in row]
        except ValueError:
            continue
        if len(values) == len(GPU_QUERY_FIELDS):
            samples.append(values)
    if not samples:
        return None
    columns = dict(zip(("power_w", "sm_clock_mhz", "temperature_c"), zip(*samples, strict=True), strict=True))
    found = {name: {"median": statistics.median(values), "max": max(values)} for name, values in columns.items()}
    return {"samples": len(samples), **found}


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


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


def limit_memory(device: torch.device, gib: float) -> None:
    """Limit the device memory of this process; on a CPU, the growth of its address space."""
    import torch

    if not gib:
        return
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, gib * 2**30 / total), device)
    else:
        with open("/proc/self/statm", encoding="ascii") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + int(gib * 2**30), resource.RLIM_INFINITY))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is an out-of-memory error."""
    import torch

    text = str(error).lower()
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(
        words in text for words in OUT_OF_MEMORY_MESSAGES
    )


def select_device(spec: dict[str, Any]) -> torch.device:
    """Return the requested device; exit if it is not available."""
    import torch

    if spec["device"] == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "--device cuda: torch finds no CUDA device; use --device cpu --quick to test the script, or fix the driver"
        )
    return torch.device(spec["device"], 0) if spec["device"] == "cuda" else torch.device("cpu")


def device_info(spec: dict[str, Any]) -> dict[str, Any]:
    """Return versions and sizes of the device."""
    import torch

    device = select_device(spec)
    facts: dict[str, Any] = {
        "status": "ok",
        "platform": platform.platform(),
        "cpu_cores": os.cpu_count(),
        "driver": gpu_query("driver_version"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": device.type,
    }
    if device.type == "cuda":
        from torch.cuda import nccl

        found = torch.cuda.get_device_properties(device)
        return facts | {
            "device": found.name,
            "memory_bytes": found.total_memory,
            "multiprocessors": found.multi_processor_count,
            "compute_capability": f"{found.major}.{found.minor}",
            "cudnn": torch.backends.cudnn.version(),
            "nccl": ".".join(map(str, nccl.version())),
            "power_limit": gpu_query("power.limit"),
        }
    return facts


def matmul(spec: dict[str, Any]) -> dict[str, Any]:
    """Time each product of `spec["shapes"]` in the engine's compute dtype (float32 on a CPU)."""
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
        best_s, median_s, flops = min(seconds), statistics.median(seconds), 2 * m * k * n
        products.append(
            {
                "m": m,
                "k": k,
                "n": n,
                "dtype": str(dtype).removeprefix("torch."),
                "repeats": TIMED_MATMULS,
                "best_s": best_s,
                "median_s": median_s,
                "best_flops_per_s": flops / best_s,
                "median_flops_per_s": flops / median_s,
            }
        )
    return {"status": "ok", "products": products}


def make_recipe(spec: dict[str, Any]) -> Recipe:
    """Return the recipe of a run whose step is one micro-batch of `spec`."""
    from lt_trainer.config import load

    base = {
        "model": {"preset": spec["preset"]},
        "data": {"store": "random ids", "seq_len": spec["seq_len"]},
        "batch": {"global_batch_size": spec["micro_batch_size"], "micro_batch_size": spec["micro_batch_size"]},
        "engine": {"gpu": {"device": spec["device"]}},
    }
    return load(base=base, overrides=spec["sets"], base_name="benchmark").recipe


def random_batch(config: LlamaConfig, spec: dict[str, Any], seed: int) -> StepBatch:
    """Return uniformly random ids with all positions labeled, a document per row.

    Never zeros, on which products run faster.
    """
    import numpy as np

    from lt_trainer.testing.layouts import step_batch

    rows, seq_len = spec["micro_batch_size"], spec["seq_len"]
    ids = np.random.default_rng(seed).integers(0, config.vocab_size, (1, rows, seq_len + 1), dtype=np.int32)
    shape = (1, rows, seq_len)
    return step_batch(
        input_ids=np.ascontiguousarray(ids[..., :-1]),
        labels=np.ascontiguousarray(ids[..., 1:]),
        position_ids=np.broadcast_to(np.arange(seq_len, dtype=np.int32), shape).copy(),
        doc_ids=np.zeros(shape, np.int32),
        valid_tokens=rows * seq_len,
    )


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of the engine's option `dtype`."""
    import torch

    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, name)


def attention_kernel(config: LlamaConfig, spec: dict[str, Any], device: torch.device, dtype: torch.dtype) -> str:
    """Return the kernel that torch's attention selects for a row of one document, which needs no bias."""
    import torch
    from torch.nn.attention import SDPBackend

    seq_len = spec["seq_len"]
    q, k = (
        torch.empty(1, seq_len, n, config.head_dim, device=device, dtype=dtype, requires_grad=True).transpose(1, 2)
        for n in (config.n_heads, config.n_kv_heads)
    )
    gqa = config.n_heads != config.n_kv_heads
    choice = torch._fused_sdp_choice(  # pyright: ignore[reportPrivateImportUsage] - the only way to ask
        q, k, k, None, 0.0, True, enable_gqa=gqa
    )
    return f"{SDPBackend(choice).name.lower()}, causal"


def memory_stats(device: torch.device) -> dict[str, Any]:
    """Return the peak memory of this process so far."""
    import torch

    scale = 1 if sys.platform == "darwin" else 1024
    found: dict[str, Any] = {"peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale}
    if device.type == "cuda":
        found["peak_allocated_bytes"] = torch.cuda.max_memory_allocated(device)
        found["peak_reserved_bytes"] = torch.cuda.max_memory_reserved(device)
        found["device_bytes"] = torch.cuda.get_device_properties(device).total_memory
    return found


def memory_plan(recipe: Recipe, config: LlamaConfig) -> dict[str, Any]:
    """Return the memory plan of `lt train plan` for one GPU with this recipe, to compare with the measured peak."""
    from lt_trainer.planning import layout_from_recipe, plan_memory

    plan = plan_memory(config, recipe.data.seq_len, layout_from_recipe(recipe, devices=1, nodes=1))
    return {"peak_bytes": plan.peak, "moment": plan.peak_phase, "parts": dict(plan.parts)}


def time_call(device: torch.device, call: Callable[[], T]) -> tuple[float, T]:
    """Time `call` with the device idle before and after; return the seconds and the result."""
    synchronize(device)
    start = time.perf_counter()
    result = call()
    synchronize(device)
    return time.perf_counter() - start, result


def train(spec: dict[str, Any]) -> dict[str, Any]:
    """Open the engine and time its steps; report where it ran out of memory."""
    device, stages = select_device(spec), [OPENING_STAGE]
    try:
        return measure_steps(spec, device, stages)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        message = str(error)[:600] or type(error).__name__
        return {"status": "out_of_memory", "during": stages[-1], "message": message, "memory": memory_stats(device)}


def measure_steps(spec: dict[str, Any], device: torch.device, stages: list[str]) -> dict[str, Any]:
    """Time the steps of one model; append each stage that starts to `stages`."""
    from lt_model import flops_per_token, n_parameters, preset
    from lt_model.costs import FLOPS_CONVENTIONS
    from lt_trainer.config import llama_config
    from lt_trainer.engine import World
    from lt_trainer_gpu.spec import SPEC

    begin = time.monotonic()
    recipe, world = make_recipe(spec), World()
    SPEC.check(recipe, world)
    os.environ.update(SPEC.env(recipe))
    for name in ("lt_trainer_gpu.engine", "lt_trainer_gpu.parallelize", "torch._dynamo"):
        importlib.import_module(name)  # so that opening is timed without them

    config = llama_config(recipe, preset(spec["preset"]).vocab_size)
    dtype = compute_dtype(recipe.engine["gpu"].dtype, device)
    limit_memory(device, spec["memory_limit_gib"])
    kernel = attention_kernel(config, spec, device, dtype)
    open_s, engine = time_call(device, lambda: SPEC.open(recipe, config, world))
    stages.append("the first step")
    warmup, lr = spec["warmup"], recipe.optimizer.lr / 100  # as in a warm-up of the learning rate
    batches = [random_batch(config, spec, seed) for seed in range(warmup + spec["steps"])]
    first_step_s, first = time_call(device, lambda: engine.step(batches[0], lr))
    stages.append("warming up")
    warm_s, warm = time_call(device, lambda: [engine.step(batch, lr) for batch in batches[1:warmup]])
    one_s = warm_s / len(warm) if warm else first_step_s
    affordable = int((spec["limit_s"] - (time.monotonic() - begin) - EXIT_MARGIN_S) / one_s)
    to_time = batches[warmup:][: max(affordable, 3)]

    stages.append("the timed steps")
    ticks, pendings = StepTimer(device), []
    with GpuMonitor(device.type) as log:
        start = time.perf_counter()
        ticks.record()
        for batch in to_time:
            pendings.append(engine.step(batch, lr))
            ticks.record()
        step_s = ticks.elapsed_seconds()
        wall_s = time.perf_counter() - start
    numbers = engine.fetch_metrics([first, *warm, *pendings])

    tokens, median_s = spec["micro_batch_size"] * spec["seq_len"], statistics.median(step_s)
    flops = {convention: flops_per_token(config, spec["seq_len"], convention) for convention in FLOPS_CONVENTIONS}
    found = {
        "status": "ok",
        "parameters": n_parameters(config),
        "dtype": str(dtype).removeprefix("torch."),
        "attention_kernel": kernel,
        "open_s": open_s,
        "first_step_s": first_step_s,
        "warmup_steps": warmup,
        "timed_steps": len(to_time),
        "step_s": {"median": median_s, "min": min(step_s), "max": max(step_s), "all": step_s},
        "wall_s_per_step": wall_s / len(to_time),
        "tokens_per_step": tokens,
        "tokens_per_s": tokens / median_s,
        "flops_per_token": flops,
        "flops_per_s": {convention: count * tokens / median_s for convention, count in flops.items()},
        "peaks": {"engine": {"flops_per_s": engine.device.peak_flops, "source": engine.device.peak_source}},
        "memory": memory_stats(device) | {"state_bytes": engine.state_bytes(), "plan": memory_plan(recipe, config)},
        "power": log.stats,
        "loss": {"first": numbers[0].loss, "last": numbers[-1].loss},
        "all_finite": all(n.is_finite for n in numbers),
    }
    engine.close()
    return found
