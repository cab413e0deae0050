"""Training benchmark of the torch engine on one GPU: tokens per second, MFU, memory, matmul peak, GPU tests.

    python tools/bench/gpu.py [--out FILE] [--budget-s 480]
    python tools/bench/gpu.py --device cpu --quick --no-tests     # tests the script itself, a minute on a CPU

Prints one JSON as the last line of stdout, and progress on stderr; `--out` is written after every stage, so an
interrupted run leaves its results so far. `METHODS`, also part of the JSON, defines each field.
Every case of `CASES` is one table row: a preset, and pairs of micro-batch size and seq_len that are tried from large to
small until one fits. Each try is a process of its own, so that running out of memory or crashing ends nothing else and
all memory is freed. Steps are those of `lt_trainer_gpu.engine`, on random token ids.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gpu_worker import OPENING_STAGE, device_info, matmul, train

from lt_model import preset
from lt_model.costs import FLOPS_CONVENTIONS, estimate_memory

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("lt-model", "lt-data", "lt-ckpt", "lt-trainer", "lt-trainer-gpu")
ALLOCATOR_ENV = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
TESTS_S, MAX_TESTS_S = 120.0, 240.0
"""Minimum remaining seconds to start the tests, and their timeout."""
MAX_FACTS_S, MAX_MATMUL_S = 60.0, 60.0
RESERVE_S = 5.0
MAX_ROWS, HEAD_ROWS = 32768, 1024
"""Largest number of rows of the block products; the loss computes the head on about a thousand tokens at a time."""
CHILDREN = {"matmul": matmul, "train": train, "facts": device_info}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Row of the table.

    Attributes:
        name: name of the row.
        preset: model preset.
        sizes: (micro_batch_size, seq_len) to try, from large to small.
        estimated_s: expected seconds of one try; skipped if less time is left.
        sets: recipe overrides such as "engine.gpu.deterministic=true".
    """

    name: str
    preset: str
    sizes: tuple[tuple[int, int], ...]
    estimated_s: float
    sets: tuple[str, ...] = ()


CASES = (
    Case(name="1b", preset="llama3.2-1b", sizes=((8, 4096), (4, 4096), (2, 4096), (1, 4096)), estimated_s=60),
    Case(name="8b", preset="llama3-8b", sizes=((2, 4096), (1, 4096), (1, 2048)), estimated_s=80),
)
QUICK_CASES = (Case(name="tiny", preset="tiny-2m", sizes=((2, 64),), estimated_s=20),)

METHODS = {
    "tests": "pytest -m gpu over packages/ and tests/ in a process of its own; counts from its JUnit file",
    "matmul": "torch.mm of normally distributed random matrices into a preallocated output, each product timed alone "
    "(CUDA events; perf_counter on a CPU) after 3 untimed ones; best and median over `repeats`; FLOPs are 2 m k n",
    "peaks.engine": "peak that the engine uses for MFU; `source` names the datasheet or measurement",
    "peaks.matmul": "best of the first product in `matmul`, on this device in this run",
    "step_s": "time between two CUDA events around one step, the host running ahead as in training (on a CPU: "
    "perf_counter around a step); all timed steps, then their median, minimum and maximum",
    "wall_s_per_step": "perf_counter over all timed steps with the device idle before and after, divided by their "
    "number; above the median of step_s by the host overhead at both ends",
    "open_s": "perf_counter around opening the engine: process group, weights, optimizer, peak; without imports",
    "first_step_s": "perf_counter around the first step with the device idle before and after; not among step_s",
    "tokens_per_s": "micro_batch_size x seq_len / median of step_s; every position counts, and has a label",
    "flops_per_s": "tokens_per_s x lt_model.flops_per_token: full = 6 per parameter without the input embedding + "
    "12 layers x width x seq_len; causal = half of the attention term; recomputation never counts",
    "mfu": "flops_per_s / peak, in both conventions against both peaks",
    "memory.peak_allocated_bytes": "torch.cuda.max_memory_allocated since the process began; reserved likewise",
    "memory.plan": "lt train plan's memory without its reserve, by part at its peak; to compare with "
    "peak_allocated_bytes",
    "memory.estimate": "lt_model.costs.estimate_memory: weights, gradients, moments in fp32, and full fp32 "
    "logits with their gradient, of which the engine holds only a part; without activations",
    "power": "nvidia-smi every 200 ms while the timed steps run: median and maximum",
    "loss": "of the first and the last step, nats per token; ids are uniformly random, so it is near ln(vocabulary)",
}


class Budget:
    """Remaining time of the run."""

    def __init__(self, total_s: float) -> None:
        self._end = time.monotonic() + total_s

    def remaining_s(self) -> float:
        """Return the remaining seconds, less the time to write the report."""
        return max(0.0, self._end - time.monotonic() - RESERVE_S)


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run_with_timeout(command: list[str], limit_s: float, env: dict[str, str] | None = None) -> tuple[int | None, str]:
    """Run a command; return its exit code, or None after a timeout, and the end of its output."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | (env or {}), stdout=log, stderr=subprocess.STDOUT, process_group=0
        )
        try:
            code: int | None = process.wait(timeout=max(limit_s, 1.0))
        except subprocess.TimeoutExpired:
            code = None
            terminate(process)
        log.seek(0)
        return code, log.read().decode(errors="replace")[-3000:]


def terminate(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a process group, so that pytest still writes its report, then kill the rest of it."""
    for number, patience_s in ((signal.SIGINT, 15.0), (signal.SIGKILL, 30.0)):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(timeout=patience_s)


def run_child(kind: str, spec: dict[str, Any], limit_s: float, env: dict[str, str] | None = None) -> dict[str, Any]:
    """Run one of `CHILDREN` in a subprocess; a crash or a timeout is a result too."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        (Path(folder) / "spec.json").write_text(json.dumps(spec | {"limit_s": limit_s}))
        command = [sys.executable, str(Path(__file__).resolve()), "--child", kind, folder]
        begin = time.monotonic()
        code, output = run_with_timeout(command, limit_s, env)
        seconds = {"seconds": time.monotonic() - begin}
        if code == 0 and result.exists():
            return json.loads(result.read_text()) | seconds
    status = "timed_out" if code is None else "crashed"
    log(f"{kind} {status}: exit code {code}\n{output}")
    return {"status": status, "exit_code": code, "output_end": output} | seconds


def run_tests(limit_s: float) -> dict[str, Any]:
    """Run the tests that need a GPU, without warnings as errors, since they vary with the torch version."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        options = ["-q", "-m", "gpu", "-W", "default", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
        command = [sys.executable, "-m", "pytest", *options, f"--junitxml={report}", "packages", "tests"]
        begin = time.monotonic()
        # without other installed plugins, which may interfere
        env = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1"}
        code, output = run_with_timeout(command, limit_s, env)
        found: dict[str, Any] = {
            "status": "timed_out" if code is None else "ran",
            "exit_code": code,
            "seconds": time.monotonic() - begin,
            "limit_s": limit_s,
        }
        if not report.exists():
            return found | {"status": found["status"] if code is None else "crashed", "output_end": output}
        return found | parse_junit(report) | {"output_end": output if code != 0 else ""}


def parse_junit(report: Path) -> dict[str, Any]:
    """Return the counts and failures of a JUnit file."""
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    counts = {name: sum(int(s.get(name, "0")) for s in suites) for name in ("tests", "failures", "errors", "skipped")}
    bad = [
        {"test": f"{case.get('classname')}.{case.get('name')}", "message": (element.get("message") or "")[:600]}
        for suite in suites
        for case in suite.iter("testcase")
        for element in case
        if element.tag in ("failure", "error")
    ]
    return {
        "passed": counts["tests"] - counts["failures"] - counts["errors"] - counts["skipped"],
        "failed": counts["failures"],
        "errors": counts["errors"],
        "skipped": counts["skipped"],
        "failures": bad,
    }


def train_case(case: Case, options: dict[str, Any], budget: Budget) -> dict[str, Any]:
    """Try the case's sizes until one fits; the others are listed in `attempts`."""
    attempts: list[dict[str, Any]] = []
    tries = [(size, {}) for size in case.sizes]
    if options["device"] == "cuda":  # what failed only because of fragmentation may fit with expandable segments
        tries.append((case.sizes[-1], ALLOCATOR_ENV))
    head = {"case": case.name, "preset": case.preset, "attempts": attempts}
    for (micro_batch_size, seq_len), env in tries:
        left_s = budget.remaining_s()
        if left_s < case.estimated_s:
            reason = f"{left_s:.0f} s of the budget are left, a try needs up to {case.estimated_s:.0f} s"
            return head | {"status": "skipped", "reason": reason}
        log(f"{case.name}: {case.preset}, micro_batch_size {micro_batch_size}, seq_len {seq_len} {env or ''}")
        spec = options | {"preset": case.preset, "micro_batch_size": micro_batch_size, "seq_len": seq_len}
        spec["sets"] = [*case.sets, *options["sets"]]
        found = run_child("train", spec, min(left_s, 2 * case.estimated_s), env)
        size = {"micro_batch_size": micro_batch_size, "seq_len": seq_len, "allocator": env or "default"}
        estimate = estimate_memory(preset(case.preset), micro_batch_size=micro_batch_size, seq_len=seq_len)
        found.setdefault("memory", {})["estimate"] = asdict(estimate) | {"total": estimate.total}
        found = size | found
        if found["status"] == "ok":
            return head | found
        attempts.append(found)
        if found["status"] != "out_of_memory":
            return head | {"status": found["status"]}
        log(f"{case.name}: out of memory, {found['during']}")
        if found["during"] == OPENING_STAGE:  # no smaller batch can help
            break
    return head | {"status": "out_of_memory"}


def add_mfu(row: dict[str, Any], matmul_peak: dict[str, Any] | None) -> dict[str, Any]:
    """Return the row with MFU in both conventions against the engine's peak and the measured one."""
    if row["status"] != "ok":
        return row
    peaks = row["peaks"] | {"matmul": matmul_peak}
    mfu = {
        convention: {
            name: row["flops_per_s"][convention] / peak["flops_per_s"] if peak else None for name, peak in peaks.items()
        }
        for convention in FLOPS_CONVENTIONS
    }
    return row | {"peaks": peaks, "mfu": mfu}


def measured_peak_flops(products: dict[str, Any]) -> dict[str, Any] | None:
    """Return the peak of the first product, or None."""
    if products["status"] != "ok":
        return None
    first = products["products"][0]
    source = f"measured, best of {first['repeats']} products {first['m']} x {first['k']} x {first['n']}"
    return {"flops_per_s": first["best_flops_per_s"], "source": f"{source} in {first['dtype']}"}


def matmul_shapes(cases: tuple[Case, ...], size: int) -> list[list[int]]:
    """Return (m, k, n) of `size`^3, then of each model: feed-forward up and down, attention, head."""
    found = [[size, size, size]]
    for case in cases:
        config = preset(case.preset)
        tokens, width = min(case.sizes[0][0] * case.sizes[0][1], MAX_ROWS), config.hidden_size
        inner = config.intermediate_size
        found += [[tokens, width, inner], [tokens, inner, width], [tokens, width, width]]
        found.append([min(tokens, HEAD_ROWS), width, config.vocab_size])
    return found


def software_versions(commit: str | None) -> dict[str, Any]:
    """Return versions of interpreter and packages, and the commit."""
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = done.stdout.strip() if done.returncode == 0 else ""
    except FileNotFoundError:
        found = ""
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
        "commit": commit or found or None,
    }


def format_table(report: dict[str, Any]) -> str:
    """Format the rows for display."""
    lines = []
    for row in report["training"]:
        text = f"{row['case']}: {row['status']}"
        if row["status"] == "ok":
            mfu = ", ".join(f"{c} {v['engine']:.1%}" for c, v in row["mfu"].items())
            text += f", {row['micro_batch_size']} x {row['seq_len']}, {row['tokens_per_s']:.0f} tokens/s, MFU {mfu}"
            measured, planned = row["memory"].get("peak_allocated_bytes"), row["memory"]["plan"]["peak_bytes"]
            if measured:
                text += f", memory {measured / 2**30:.1f} GiB, planned {planned / 2**30:.1f} ({planned / measured:.2f})"
        lines.append(text)
    tests = report["tests"]
    lines.append(
        "tests: " + ", ".join(f"{k} {tests[k]}" for k in ("status", "passed", "failed", "skipped") if k in tests)
    )
    return "\n".join(lines)


def select_cases(arguments: argparse.Namespace) -> tuple[Case, ...]:
    """Return the cases selected on the command line."""
    cases = QUICK_CASES if arguments.quick else CASES
    if arguments.models:
        known = {case.preset: case for case in cases}
        cases = tuple(
            known.get(
                name, Case(name=name, preset=name, sizes=QUICK_CASES[0].sizes, estimated_s=QUICK_CASES[0].estimated_s)
            )
            for name in arguments.models.split(",")
        )
    if arguments.seq_len:
        cases = tuple(replace(c, sizes=tuple((m, arguments.seq_len) for m, _ in c.sizes)) for c in cases)
    if arguments.micro_batches:
        batches = [int(text) for text in arguments.micro_batches.split(",")]
        cases = tuple(replace(c, sizes=tuple((m, c.sizes[0][1]) for m in batches)) for c in cases)
    return cases


def run_benchmark(arguments: argparse.Namespace) -> dict[str, Any]:
    """All stages; the report is written after each."""
    budget, begin = Budget(arguments.budget_s), time.monotonic()
    cases = select_cases(arguments)
    small = arguments.quick or arguments.device == "cpu"
    options = {
        "device": arguments.device,
        "warmup": arguments.warmup or (1 if small else 3),
        "steps": arguments.steps or (3 if small else 10),
        "memory_limit_gib": arguments.memory_limit_gib,
        "sets": arguments.set,
    }
    report: dict[str, Any] = {
        "benchmark": "gpu",
        "format": 1,
        "complete": False,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": software_versions(arguments.commit),
        "options": options | {"budget_s": arguments.budget_s},
        "how": METHODS,
        "tests": {"status": "skipped", "reason": "--no-tests"},
        "matmul": {"status": "skipped", "reason": "not reached"},
        "training": [],
    }

    def keep(**parts: Any) -> None:
        report.update(parts, seconds=time.monotonic() - begin)
        if arguments.out:
            arguments.out.write_text(json.dumps(report, indent=1) + "\n")

    keep(machine=run_child("facts", options, MAX_FACTS_S))
    spec = options | {"shapes": matmul_shapes(cases, 256 if small else 8192)}
    keep(matmul=run_child("matmul", spec, MAX_MATMUL_S))
    peak = measured_peak_flops(report["matmul"])
    if not arguments.no_tests:
        left_s = budget.remaining_s() - sum(case.estimated_s for case in cases)
        enough = left_s >= TESTS_S
        reason = {"status": "skipped", "reason": f"{left_s:.0f} s of the budget are free for them, not {TESTS_S:.0f}"}
        limit_s = min(left_s, MAX_TESTS_S)
        log(f"tests, at most {limit_s:.0f} s" if enough else f"tests skipped: {reason['reason']}")
        keep(tests=run_tests(limit_s) if enough else reason)
    for case in cases:
        keep(training=[*report["training"], add_mfu(train_case(case, options, budget), peak)])
    keep(complete=True)
    return report


def main() -> None:
    """Run as the benchmark, or as one of its children."""
    if sys.argv[1:2] == ["--child"]:
        kind, folder = sys.argv[2], Path(sys.argv[3])
        result = CHILDREN[kind](json.loads((folder / "spec.json").read_text()))
        (folder / "result.json").write_text(json.dumps(result))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the JSON here too, after every stage")
    parser.add_argument("--budget-s", type=float, default=480.0, help="what would not fit into it is skipped")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="a tiny model and small products: tries the script itself")
    parser.add_argument("--no-tests", action="store_true", help="do not run the GPU tests")
    parser.add_argument("--models", default="", help="presets instead of the table's, separated by commas")
    parser.add_argument("--micro-batches", default="", help="micro-batches to try instead, from large to small: 8,4")
    parser.add_argument("--seq-len", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0, help="timed steps")
    parser.add_argument("--warmup", type=int, default=0, help="steps before them, the first one included")
    parser.add_argument("--memory-limit-gib", type=float, default=0.0, help="as if the device had only this much")
    parser.add_argument("--set", action="append", default=[], help="recipe override such as engine.gpu.dtype=float32")
    parser.add_argument("--commit", help="commit to note where there is no git")
    report = run_benchmark(parser.parse_args())
    log(format_table(report))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
