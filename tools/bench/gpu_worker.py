"""Subprocesses of gpu.py: device information, matrix products, the steps of one model.

Each function takes the values of one JSON and returns those of another. Torch is imported inside, after the engine's
environment variables are set, and because gpu.py itself must not use a device. On a CPU the same code runs with another
clock and without counts of allocated bytes.
"""

from __future__ import annotations

import importlib
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_sensors import GpuMonitor, StepTimer, gpu_query, synchronize, time_call

if TYPE_CHECKING:
    import numpy as np
    import torch

    from lt_model import LlamaConfig
    from lt_trainer.config.sections.recipe import Recipe
    from lt_trainer.engine import Engine, StepBatch

OPENING_STAGE = "opening the engine"
EXIT_MARGIN_S = 10.0
"""Seconds of a child's time that are kept for what comes after the timed steps."""
WARMUP_MATMULS, TIMED_MATMULS = 3, 30
OUT_OF_MEMORY_MESSAGES = ("out of memory", "alloc_failed", "can't allocate memory", "cannot allocate memory")
"""What torch, cuBLAS and the CPU's allocator say; not all of them raise torch.OutOfMemoryError."""


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
    facts: dict[str, Any] = {
        "status": "ok",
        "platform": platform.platform(),
        "cpu_cores": os.cpu_count(),
        "driver": gpu_query("driver_version"),
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
        "multiprocessors": found.multi_processor_count,
        "compute_capability": f"{found.major}.{found.minor}",
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, nccl.version())),
        "power_limit": gpu_query("power.limit"),
    }


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


def prepare_recipe(spec: dict[str, Any]) -> Recipe:
    """Return the recipe of a run whose step is one micro-batch of `spec`; set the engine's environment variables."""
    from lt_trainer.config.recipe import load
    from lt_trainer.engine import World
    from lt_trainer_gpu.spec import SPEC

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
    return recipe


def model_config(spec: dict[str, Any], recipe: Recipe) -> LlamaConfig:
    """Return the model of a recipe, with the vocabulary of its preset."""
    from lt_model import preset
    from lt_trainer.config.recipe import llama_config

    return llama_config(recipe, preset(spec["preset"]).vocab_size)


def open_engine(recipe: Recipe, config: LlamaConfig) -> Engine:
    """Open the engine in this process."""
    from lt_trainer.engine import World
    from lt_trainer_gpu.spec import SPEC

    return SPEC.open(recipe, config, World())


def random_ids(spec: dict[str, Any], vocab_size: int, seed: int) -> np.ndarray:
    """Return uniformly random ids [1, rows, seq_len + 1]; never zeros, on which products run faster."""
    import numpy as np

    shape = (1, spec["micro_batch_size"], spec["seq_len"] + 1)
    return np.random.default_rng(seed).integers(0, vocab_size, shape, dtype=np.int32)


def batch_of_rows(ids: np.ndarray, document_tokens: int) -> StepBatch:
    """Return a step of one micro-batch from ids [1, rows, seq_len + 1], every position with a label.

    Args:
        ids: token ids.
        document_tokens: tokens of a document; 0 for rows of one document.
    """
    import numpy as np

    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "helpers"))
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


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of the engine's option `dtype`."""
    import torch

    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, name)


def sdpa_kernel(config: LlamaConfig, seq_len: int, device: torch.device, dtype: torch.dtype) -> str:
    """Return the kernel that torch's SDPA selects for a row of one document, which needs no bias."""
    import torch
    from torch.nn.attention import SDPBackend

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
    from lt_trainer.planning.layout import layout_from_recipe
    from lt_trainer.planning.memory import plan_memory

    plan = plan_memory(config, recipe.data.seq_len, layout_from_recipe(recipe, devices=1, nodes=1))
    return {"peak_bytes": plan.peak, "moment": plan.peak_phase, "parts": dict(plan.parts)}


def train(spec: dict[str, Any]) -> dict[str, Any]:
    """Open the engine and time its steps; report where it ran out of memory."""
    return _report_out_of_memory(spec, measure_steps)


def train_plain(spec: dict[str, Any]) -> dict[str, Any]:
    """Time the steps of the plain FSDP2 model; report where it ran out of memory."""
    from gpu_plain import measure_plain

    return _report_out_of_memory(spec, measure_plain)


def _report_out_of_memory(
    spec: dict[str, Any], measure: Callable[[dict[str, Any], torch.device, list[str]], dict[str, Any]]
) -> dict[str, Any]:
    prepare_recipe(spec)  # sets the allocator's variables before torch is loaded
    device, stages = select_device(spec), [OPENING_STAGE]
    try:
        return measure(spec, device, stages)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        message = str(error)[:600] or type(error).__name__
        return {"status": "out_of_memory", "during": stages[-1], "message": message, "memory": memory_stats(device)}


def time_steps(
    spec: dict[str, Any], device: torch.device, stages: list[str], step: Callable[[int], Any]
) -> dict[str, Any]:
    """Call `step` with seeds 0, 1, ... to warm up, then timed; return its results in `pendings`, and the times."""
    begin, warmup = time.monotonic(), spec["warmup"]
    stages.append("the first step")
    first_step_s, first = time_call(device, lambda: step(0))
    stages.append("warming up")
    warm_s, warm = time_call(device, lambda: [step(seed) for seed in range(1, warmup)])
    one_s = warm_s / len(warm) if warm else first_step_s
    affordable = int((spec["limit_s"] - spec["seconds_before"] - (time.monotonic() - begin) - EXIT_MARGIN_S) / one_s)
    n_timed = min(spec["steps"], max(affordable, 3))

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
        "pendings": [first, *warm, *pendings],
        "first_step_s": first_step_s,
        "warmup_steps": warmup,
        "timed_steps": n_timed,
        "step_s": {"median": statistics.median(step_s), "min": min(step_s), "max": max(step_s), "all": step_s},
        "wall_s_per_step": wall_s / n_timed,
        "power": monitor.stats,
    }


def throughput(spec: dict[str, Any], config: LlamaConfig, median_s: float) -> dict[str, Any]:
    """Return tokens and FLOPs per second in both conventions."""
    from lt_model import flops_per_token, n_parameters
    from lt_model.costs import FLOPS_CONVENTIONS

    tokens = spec["micro_batch_size"] * spec["seq_len"]
    flops = {convention: flops_per_token(config, spec["seq_len"], convention) for convention in FLOPS_CONVENTIONS}
    return {
        "parameters": n_parameters(config),
        "n_layers": config.n_layers,
        "tokens_per_step": tokens,
        "tokens_per_s": tokens / median_s,
        "flops_per_token": flops,
        "flops_per_s": {convention: count * tokens / median_s for convention, count in flops.items()},
    }


def summarize_losses(losses: Sequence[float]) -> dict[str, float]:
    """Return the losses of the first and the last step."""
    return {"first": losses[0], "last": losses[-1]}


def measure_steps(spec: dict[str, Any], device: torch.device, stages: list[str]) -> dict[str, Any]:
    """Time the steps of one model; append each stage that starts to `stages`."""
    begin, recipe = time.monotonic(), prepare_recipe(spec)
    for name in ("lt_trainer_gpu.engine", "lt_trainer_gpu.parallelize", "torch._dynamo"):
        importlib.import_module(name)  # so that opening is timed without them
    config = model_config(spec, recipe)
    dtype = compute_dtype(recipe.engine["gpu"].dtype, device)
    limit_memory(device, spec["memory_limit_gib"])
    kernel = sdpa_kernel(config, spec["seq_len"], device, dtype)
    open_s, engine = time_call(device, lambda: open_engine(recipe, config))
    count, lr = spec["warmup"] + spec["steps"], recipe.optimizer.lr / 100  # as in a warm-up of the learning rate
    batches = [
        batch_of_rows(random_ids(spec, config.vocab_size, seed), spec["document_tokens"]) for seed in range(count)
    ]
    spec = spec | {"seconds_before": time.monotonic() - begin}
    timed = time_steps(spec, device, stages, lambda seed: engine.step(batches[seed], lr))
    metrics = engine.fetch_metrics(timed.pop("pendings"))
    found = {
        "status": "ok",
        "dtype": str(dtype).removeprefix("torch."),
        "resolved": dict(engine.device.resolved),
        "notes": list(engine.device.notes),
        "sdpa_kernel": kernel,
        "open_s": open_s,
        **timed,
        **throughput(spec, config, timed["step_s"]["median"]),
        "peaks": {"engine": {"flops_per_s": engine.device.peak_flops, "source": engine.device.peak_source}},
        "memory": memory_stats(device) | {"state_bytes": engine.state_bytes(), "plan": memory_plan(recipe, config)},
        "loss": summarize_losses([values.loss for values in metrics]),
        "all_finite": all(values.is_finite for values in metrics),
    }
    engine.close()
    return found
