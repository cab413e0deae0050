"""What runs in processes of its own for gpu.py: facts of the device, matrix products, the steps of one model.

Each function takes the values of one JSON and returns those of another. Torch is imported inside, because gpu.py itself
must not hold a device. On a CPU the same code runs with another clock and without a count of allocated bytes.
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
    from lt_trainer.engine import StepBatch
    from lt_trainer.recipe import Recipe

T = TypeVar("T")

OPENING = "opening the engine"
LEAVING_S = 10.0
"""Seconds of a child's time that are kept for what comes after the timed steps."""
WARM_PRODUCTS, PRODUCTS = 3, 30
MEASURED = ("power.draw", "clocks.sm", "temperature.gpu")
OUT_OF_MEMORY = ("out of memory", "alloc_failed", "can't allocate memory", "cannot allocate memory")
"""What torch, cuBLAS and the CPU's allocator say; not all of them raise torch.OutOfMemoryError."""


def gpu_query(fields: str) -> str | None:
    """The first line of nvidia-smi's answer, or None where there is none."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else None


class GpuLog:
    """Power, clock and temperature every 200 ms while it is open, if nvidia-smi is there; the host is not disturbed."""

    def __init__(self, kind: str) -> None:
        self._wanted = kind == "cuda" and shutil.which("nvidia-smi") is not None

    def __enter__(self) -> GpuLog:
        self._file = tempfile.TemporaryFile("w+")
        query = ["-i", "0", f"--query-gpu={','.join(MEASURED)}", "--format=csv,noheader,nounits", "-lms", "200"]
        self._process = (
            subprocess.Popen(["nvidia-smi", *query], stdout=self._file, stderr=subprocess.DEVNULL)
            if self._wanted
            else None
        )
        return self

    def __exit__(self, *error: object) -> None:
        self.found: dict[str, Any] | None = None
        if self._process is not None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=10)
            self._file.seek(0)
            self.found = summary(list(csv.reader(self._file)))
        self._file.close()


def summary(rows: list[list[str]]) -> dict[str, Any] | None:
    """Median and greatest of each column of `MEASURED`; lines that are not numbers, such as a cut one, are left out."""
    samples = []
    for row in rows:
        try:
            values = [float(text) for text in row]
        except ValueError:
            continue
        if len(values) == len(MEASURED):
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


class Ticks:
    """Moments between which time is taken: CUDA events, which the host does not wait for, or perf_counter on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ticks: list[Any] = []

    def tick(self) -> None:
        """A moment."""
        import torch

        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._ticks.append(event)
        else:
            self._ticks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Between each moment and the next, after waiting for the last."""
        synchronize(self._device)
        pairs = zip(self._ticks, self._ticks[1:], strict=False)
        if self._device.type == "cuda":
            return [before.elapsed_time(after) / 1000 for before, after in pairs]
        return [after - before for before, after in pairs]


def limit_memory(device: torch.device, gib: float) -> None:
    """Let this process have only so much memory of the device; on a CPU, so much more than it has now."""
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


def ran_out(error: BaseException) -> bool:
    """Whether an error says that there is no more memory."""
    import torch

    text = str(error).lower()
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(words in text for words in OUT_OF_MEMORY)


def device_of(spec: dict[str, Any]) -> torch.device:
    """The device that is asked for; an error where it is not there."""
    import torch

    if spec["device"] == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch finds no CUDA device: use --device cpu --quick to try the script, or mend the driver")
    return torch.device(spec["device"], 0) if spec["device"] == "cuda" else torch.device("cpu")


def device_facts(spec: dict[str, Any]) -> dict[str, Any]:
    """Versions and sizes of what computes."""
    import torch

    device = device_of(spec)
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

    device = device_of(spec)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    products = []
    for m, k, n in spec["shapes"]:
        a = torch.randn(m, k, device=device, dtype=dtype)
        b = torch.randn(k, n, device=device, dtype=dtype)
        out = torch.empty(m, n, device=device, dtype=dtype)
        for _ in range(WARM_PRODUCTS):
            torch.mm(a, b, out=out)
        synchronize(device)
        ticks = Ticks(device)
        ticks.tick()
        for _ in range(PRODUCTS):
            torch.mm(a, b, out=out)
            ticks.tick()
        seconds = ticks.seconds()
        best_s, median_s, flops = min(seconds), statistics.median(seconds), 2 * m * k * n
        products.append(
            {
                "m": m,
                "k": k,
                "n": n,
                "dtype": str(dtype).removeprefix("torch."),
                "repeats": PRODUCTS,
                "best_s": best_s,
                "median_s": median_s,
                "best_flops_per_s": flops / best_s,
                "median_flops_per_s": flops / median_s,
            }
        )
    return {"status": "ok", "products": products}


def recipe_of(spec: dict[str, Any]) -> Recipe:
    """The recipe of a run whose step is one micro-batch of `spec`."""
    from lt_trainer.recipe import load

    base = {
        "model": {"preset": spec["preset"]},
        "data": {"store": "random ids", "seq_len": spec["seq_len"]},
        "batch": {"global_batch": spec["micro_batch"], "micro_batch": spec["micro_batch"]},
        "engine": {"gpu": {"device": spec["device"]}},
    }
    return load(base=base, sets=spec["sets"], base_name="benchmark").recipe


def random_batch(config: LlamaConfig, spec: dict[str, Any], seed: int) -> StepBatch:
    """Uniformly random ids, never zeros (on which products run faster); one document a row; every position labelled."""
    import numpy as np

    from lt_trainer.engine import StepBatch

    rows, seq_len = spec["micro_batch"], spec["seq_len"]
    ids = np.random.default_rng(seed).integers(0, config.vocab_size, (1, rows, seq_len + 1), dtype=np.int32)
    shape = (1, rows, seq_len)
    return StepBatch(
        input_ids=np.ascontiguousarray(ids[..., :-1]),
        labels=np.ascontiguousarray(ids[..., 1:]),
        position_ids=np.broadcast_to(np.arange(seq_len, dtype=np.int32), shape).copy(),
        doc_ids=np.zeros(shape, np.int32),
        valid_tokens=rows * seq_len,
    )


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype behind the engine's option `dtype`."""
    import torch

    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, name)


def attention_kernel(config: LlamaConfig, spec: dict[str, Any], device: torch.device, dtype: torch.dtype) -> str:
    """What torch's attention chooses for one row, with the bias that the model makes of one document."""
    import torch
    from torch.nn.attention import SDPBackend

    from lt_model.attention import document_bias

    seq_len = spec["seq_len"]
    q, k = (
        torch.empty(1, seq_len, n, config.head_dim, device=device, dtype=dtype, requires_grad=True).transpose(1, 2)
        for n in (config.n_heads, config.n_kv_heads)
    )
    bias = document_bias(torch.zeros(1, seq_len, dtype=torch.int64, device=device), dtype)
    gqa = config.n_heads != config.n_kv_heads
    choice = torch._fused_sdp_choice(  # pyright: ignore[reportPrivateImportUsage] - the only way to ask
        q, k, k, bias, 0.0, bias is None, enable_gqa=gqa
    )
    return f"{SDPBackend(choice).name.lower()}, {'causal' if bias is None else 'with a dense mask'}"


def memory_of(device: torch.device) -> dict[str, Any]:
    """The most that this process has held so far."""
    import torch

    scale = 1 if sys.platform == "darwin" else 1024
    found: dict[str, Any] = {"peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale}
    if device.type == "cuda":
        found["peak_allocated_bytes"] = torch.cuda.max_memory_allocated(device)
        found["peak_reserved_bytes"] = torch.cuda.max_memory_reserved(device)
        found["device_bytes"] = torch.cuda.get_device_properties(device).total_memory
    return found


def plan_of(recipe: Recipe, config: LlamaConfig) -> dict[str, Any]:
    """What `lt train plan` says of one GPU that runs this recipe, to be held against the measured peak."""
    from lt_trainer.planning.layout import of
    from lt_trainer.planning.memory import planned_memory

    plan = planned_memory(config, recipe.data.seq_len, of(recipe, devices=1, nodes=1))
    return {"peak_bytes": plan.peak, "moment": plan.moment, "parts": dict(plan.parts)}


def timed(device: torch.device, do: Callable[[], T]) -> tuple[float, T]:
    """Seconds that `do` takes, with the device idle before and after."""
    synchronize(device)
    start = time.perf_counter()
    result = do()
    synchronize(device)
    return time.perf_counter() - start, result


def train(spec: dict[str, Any]) -> dict[str, Any]:
    """Open the engine, run the steps, and tell how long they took; or where it ran out of memory."""
    device, doing = device_of(spec), [OPENING]
    try:
        return measure(spec, device, doing)
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
        message = str(error)[:600] or type(error).__name__
        return {"status": "out_of_memory", "during": doing[-1], "message": message, "memory": memory_of(device)}


def measure(spec: dict[str, Any], device: torch.device, doing: list[str]) -> dict[str, Any]:
    """The steps of one model; what is under way is appended to `doing`."""
    from lt_model import flops_per_token, n_parameters, preset
    from lt_model.costs import CONVENTIONS
    from lt_trainer.engine import World
    from lt_trainer.recipe import llama_config
    from lt_trainer_gpu.spec import SPEC

    begin = time.monotonic()
    recipe, world = recipe_of(spec), World()
    SPEC.check(recipe, world)
    os.environ.update(SPEC.env(recipe))
    for name in ("lt_trainer_gpu.engine", "lt_trainer_gpu.parallelize", "torch._dynamo"):
        importlib.import_module(name)  # so that opening is timed without them

    config = llama_config(recipe, preset(spec["preset"]).vocab_size)
    dtype = compute_dtype(recipe.engine["gpu"].dtype, device)
    limit_memory(device, spec["memory_limit_gib"])
    kernel = attention_kernel(config, spec, device, dtype)
    open_s, engine = timed(device, lambda: SPEC.open(recipe, config, world))
    doing.append("the first step")
    warmup, lr = spec["warmup"], recipe.optimizer.lr / 100  # as in a warm-up of the learning rate
    batches = [random_batch(config, spec, seed) for seed in range(warmup + spec["steps"])]
    first_step_s, first = timed(device, lambda: engine.step(batches[0], lr))
    doing.append("warming up")
    warm_s, warm = timed(device, lambda: [engine.step(batch, lr) for batch in batches[1:warmup]])
    one_s = warm_s / len(warm) if warm else first_step_s
    affordable = int((spec["limit_s"] - (time.monotonic() - begin) - LEAVING_S) / one_s)
    to_time = batches[warmup:][: max(affordable, 3)]

    doing.append("the timed steps")
    ticks, pendings = Ticks(device), []
    with GpuLog(device.type) as log:
        start = time.perf_counter()
        ticks.tick()
        for batch in to_time:
            pendings.append(engine.step(batch, lr))
            ticks.tick()
        step_s = ticks.seconds()
        wall_s = time.perf_counter() - start
    numbers = engine.read([first, *warm, *pendings])

    tokens, median_s = spec["micro_batch"] * spec["seq_len"], statistics.median(step_s)
    flops = {convention: flops_per_token(config, spec["seq_len"], convention) for convention in CONVENTIONS}
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
        "memory": memory_of(device) | {"state_bytes": engine.state_bytes(), "plan": plan_of(recipe, config)},
        "power": log.found,
        "loss": {"first": numbers[0].loss, "last": numbers[-1].loss},
        "all_finite": all(n.finite for n in numbers),
    }
    engine.close()
    return found
