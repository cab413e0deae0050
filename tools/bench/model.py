"""Loss and attention of lt-model on the CPU: time and memory as ratios within one run.

    uv run python tools/bench/model.py                # JSON and, with --write, docs/benchmarks/model.md

One thread; CPU seconds of forward and backward; variants alternate, and the median of the repeats counts. The loss:
hidden states through the head to the summed cross-entropy, chunked (`linear_cross_entropy_sum`) and plain
(`cross_entropy_sum` of the logits); memory is the peak resident size of a process that computes it once, minus that of
one that only makes the inputs. Attention: one row with documents of equal length, by each CPU backend.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor

from lt_model import cross_entropy_sum, linear_cross_entropy_sum
from lt_model.attention import attention_backend, available_backends
from lt_model.documents import DocumentBoundaries

PAGE = Path(__file__).parents[2] / "docs/benchmarks/model.md"
LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "plain": lambda hidden, weight, labels: cross_entropy_sum(hidden @ weight.T, labels),
    "chunked": linear_cross_entropy_sum,
    "chunked, z-loss": lambda *inputs: linear_cross_entropy_sum(*inputs, z_loss=1e-4),
    "chunked, padded to 64": lambda *inputs: linear_cross_entropy_sum(*inputs, pad_to_multiple_of=64),
}
LOSS_SHAPES = ((512, 768, 32000, "float32"), (1024, 768, 32000, "bfloat16"), (1024, 768, 32003, "bfloat16"))
MEMORY_SHAPE = (2048, 256, 128_256, "float32")
ATTENTION_SHAPES = ((1024, 1024), (1024, 256), (1024, 32))
HEADS, HEAD_DIM = 12, 64


def main() -> int:
    """Measure, print JSON, and optionally write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks/model.md")
    parser.add_argument("--child", choices=["inputs", *LOSSES], help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.child:
        print(json.dumps(measure_peak_bytes(options.child)))
        return 0
    found = {
        "machine": machine_info(),
        "loss": [measure_loss_times(shape, options.repeats) for shape in LOSS_SHAPES],
        "loss_memory": measure_loss_memory(),
        "attention": [
            measure_attention_times(*shape, dtype, options.repeats)
            for dtype in ("float32", "bfloat16")
            for shape in ATTENTION_SHAPES
        ],
    }
    print(json.dumps(found, indent=1))
    if options.write:
        PAGE.write_text(render_page(found), encoding="utf-8")
    return 0


def machine_info() -> dict[str, object]:
    """Return CPU, load and versions of the measurement."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def median_interleaved(functions: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the median CPU seconds of each variant, after one uncounted round."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(repeats + 1):
        for name, function in functions.items():
            start = time.process_time()
            function()
            if turn:
                seconds[name].append(time.process_time() - start)
    return {name: round(statistics.median(values), 5) for name, values in seconds.items()}


def make_loss_inputs(n_tokens: int, width: int, vocab: int, dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, the head's weight and labels."""
    torch.manual_seed(0)
    hidden = torch.randn(n_tokens, width).to(getattr(torch, dtype)).requires_grad_()
    weight = torch.randn(vocab, width).mul_(0.02).to(getattr(torch, dtype)).requires_grad_()
    return hidden, weight, torch.randint(0, vocab, (n_tokens,))


def measure_loss_times(shape: tuple[int, int, int, str], repeats: int) -> dict[str, object]:
    """Return the CPU seconds of forward and backward by variant."""
    hidden, weight, _ = inputs = make_loss_inputs(*shape)

    def backward_of(loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(loss(*inputs), (hidden, weight))

    return {
        "shape": shape,
        "cpu_s": median_interleaved({name: backward_of(loss) for name, loss in LOSSES.items()}, repeats),
    }


def measure_peak_bytes(name: str) -> int:
    """Return the peak resident bytes of one forward and backward pass, or of the inputs alone."""
    hidden, weight, labels = make_loss_inputs(*MEMORY_SHAPE)
    if name != "inputs":
        gradients = torch.autograd.grad(LOSSES[name](hidden, weight, labels), (hidden, weight))
        assert all(bool(gradient.isfinite().all()) for gradient in gradients)
    status = Path("/proc/self/status")
    if status.exists():  # on Linux getrusage includes the peak of the parent process
        (line,) = (line for line in status.read_text(encoding="utf-8").splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def measure_loss_memory() -> dict[str, object]:
    """Return MiB above the inputs, including the gradients of hidden states and head."""
    found = {}
    for name in ("inputs", "plain", "chunked"):
        done = subprocess.run([sys.executable, __file__, "--child", name], capture_output=True, text=True, check=True)
        found[name] = int(done.stdout)
    above = {name: round((found[name] - found["inputs"]) / 2**20) for name in ("plain", "chunked")}
    return {"shape": MEMORY_SHAPE, "mib": above, "of_plain": round(above["chunked"] / above["plain"], 3)}


def measure_attention_times(n_tokens: int, length: int, dtype: str, repeats: int) -> dict[str, object]:
    """Return the CPU seconds of forward and backward of one layer's attention."""
    torch.manual_seed(0)
    kind, device = getattr(torch, dtype), torch.device("cpu")
    qkv = q, k, v = tuple(torch.randn(1, n_tokens, HEADS, HEAD_DIM).to(kind).requires_grad_() for _ in range(3))
    upstream = torch.randn(1, n_tokens, HEADS, HEAD_DIM).to(kind)
    boundaries = DocumentBoundaries.from_doc_ids((torch.arange(n_tokens) // length)[None])

    def backward_of(name: str) -> Callable[[], object]:
        backend = attention_backend(name, device=device, dtype=kind)
        # once per forward pass of all layers, so not timed
        mask = backend.make_mask(boundaries, device, kind)
        return lambda: torch.autograd.grad(backend.attend(q, k, v, mask), qkv, upstream)

    names = [name for name in available_backends("cpu", kind) if name not in ("auto", "reference")]
    cpu_s = median_interleaved({name: backward_of(name) for name in names}, repeats)
    return {"tokens": n_tokens, "document": length, "dtype": dtype, "cpu_s": cpu_s}


def render_page(found: dict[str, object]) -> str:
    """Return the page of docs/benchmarks."""
    machine = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in found["machine"].items())  # type: ignore[attr-defined]
    lines = [
        "# Loss and attention on the CPU",
        "",
        "Measured by `uv run python tools/bench/model.py --write`. One thread, milliseconds of CPU time of forward and",
        "backward, medians; the variants of a row take turns within one run.",
        "",
        machine + ".",
        "",
        "## Loss",
        "",
        "| tokens, width, vocabulary, dtype | " + " | ".join(LOSSES) + " | plain / chunked |",
        "|---" * (len(LOSSES) + 2) + "|",
    ]
    for row in found["loss"]:  # type: ignore[attr-defined]
        cpu_s = row["cpu_s"]
        cells = " | ".join(f"{1e3 * cpu_s[name]:.0f}" for name in LOSSES)
        shape = ", ".join(map(str, row["shape"]))
        lines.append(f"| {shape} | {cells} | {cpu_s['plain'] / cpu_s['chunked']:.2f} |")
    memory = found["loss_memory"]
    shape, mib, share = (memory[name] for name in ("shape", "mib", "of_plain"))  # type: ignore[index]
    lines += [
        "",
        f"Resident memory above the inputs, gradients included ({', '.join(map(str, shape))}): "
        f"plain {mib['plain']} MiB, chunked {mib['chunked']} MiB, {100 * share:.1f} %.",
        "",
        "## Attention",
        "",
        f"{HEADS} heads of {HEAD_DIM}, one row, documents of one length. `auto` uses `split` if a row has several.",
        "",
    ]
    rows = found["attention"]
    names = list(rows[0]["cpu_s"])  # type: ignore[index]
    lines += [
        "| tokens | document | dtype | " + " | ".join(names) + " | sdpa / split |",
        "|---" * (len(names) + 4) + "|",
    ]
    for row in rows:  # type: ignore[attr-defined]
        cpu_s = row["cpu_s"]
        cells = " | ".join(f"{1e3 * cpu_s[name]:.1f}" for name in names)
        ratio = cpu_s["sdpa"] / cpu_s["split"]
        lines.append(f"| {row['tokens']} | {row['document']} | {row['dtype']} | {cells} | {ratio:.2f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
