"""Training steps of the torch engine on one GPU: tokens per second, MFU and memory; the matmul peak; the GPU tests.

    python tools/bench/gpu.py [--out FILE] [--budget-s 480]
    python tools/bench/gpu.py --device cpu --quick --no-tests     # tries the script itself, a minute on a CPU

Prints one JSON as the last line of stdout, and progress on stderr; `--out` is written after every stage, so a run that
is cut short leaves what it had. docs/benchmarks/gpu.md says what each field means; `HOW` says it in the JSON itself.

Every case of `CASES` is one table row: a preset, and pairs of micro-batch and seq_len that are tried from large to
small until one fits. Each try is a process of its own, so that running out of memory or crashing ends nothing else and
the memory is really given back. Steps are those of `lt_trainer_gpu.engine`, on random token ids.
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

from gpu_child import OPENING, device_facts, matmul, train

from lt_model import preset
from lt_model.costs import CONVENTIONS, memory

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("lt-model", "lt-data", "lt-ckpt", "lt-trainer", "lt-trainer-gpu")
EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
TESTS_S, TESTS_AT_MOST_S = 120.0, 240.0
"""Seconds without which the tests are not begun, and after which they are ended."""
FACTS_AT_MOST_S, MATMUL_AT_MOST_S = 60.0, 60.0
RESERVE_S = 5.0
MOST_ROWS, HEAD_ROWS = 32768, 1024
"""Rows of the products: in the blocks at most so many; the loss takes about a thousand tokens at a time to the head."""
CHILDREN = {"matmul": matmul, "train": train, "facts": device_facts}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row of the table.

    Attributes:
        name: of the row.
        preset: the model.
        sizes: (micro_batch, seq_len) to try, from large to small.
        needs_s: what one try may take; with less left it is skipped.
        sets: recipe overrides such as "engine.gpu.deterministic=true".
    """

    name: str
    preset: str
    sizes: tuple[tuple[int, int], ...]
    needs_s: float
    sets: tuple[str, ...] = ()


CASES = (
    Case(name="1b", preset="llama3.2-1b", sizes=((8, 4096), (4, 4096), (2, 4096), (1, 4096)), needs_s=60),
    Case(name="8b", preset="llama3-8b", sizes=((2, 4096), (1, 4096), (1, 2048)), needs_s=80),
)
QUICK = (Case(name="tiny", preset="tiny-2m", sizes=((2, 64),), needs_s=20),)

HOW = {
    "tests": "pytest -m gpu over packages/ and tests/ in a process of its own; counts from its JUnit file",
    "matmul": "torch.mm of normally distributed random matrices into a ready output, each product timed alone (CUDA "
    "events; perf_counter on a CPU) after 3 untimed ones; best and median over `repeats`; FLOPs are 2 m k n",
    "peaks.engine": "what the engine itself measures MFU against; `source` says which datasheet or measurement",
    "peaks.matmul": "best of the first product in `matmul`, on this device in this run",
    "step_s": "time between two CUDA events around one step, the host running ahead as in training (on a CPU: "
    "perf_counter around a step); all timed steps, then their median, least and greatest",
    "wall_s_per_step": "perf_counter over all timed steps with the device idle before and after, divided by their "
    "number; above the median of step_s by what the host costs at the ends",
    "open_s": "perf_counter around opening the engine: process group, weights, optimizer, peak; without imports",
    "first_step_s": "perf_counter around the first step with the device idle before and after; not among step_s",
    "tokens_per_s": "micro_batch x seq_len / median of step_s; every position counts, and has a label",
    "flops_per_s": "tokens_per_s x lt_model.flops_per_token: full = 6 per parameter without the input embedding + "
    "12 layers x width x seq_len; causal = half of the attention term; recomputation never counts",
    "mfu": "flops_per_s / peak, in both conventions against both peaks",
    "memory.peak_allocated_bytes": "torch.cuda.max_memory_allocated since the process began; reserved likewise",
    "memory.plan": "lt train plan's memory without its reserve, by part at its peak; to be held against "
    "peak_allocated_bytes",
    "memory.estimate": "lt_model.costs.memory: weights, gradients, moments in fp32, and whole fp32 logits with their "
    "gradient, of which the engine holds only a part; activations are not in it",
    "power": "nvidia-smi every 200 ms while the timed steps run: median and greatest",
    "loss": "of the first and the last step, nats per token; ids are uniformly random, so it is near ln(vocabulary)",
}


class Budget:
    """Seconds that are left of the run."""

    def __init__(self, total_s: float) -> None:
        self._end = time.monotonic() + total_s

    def left_s(self) -> float:
        """They, less what it takes to write the report."""
        return max(0.0, self._end - time.monotonic() - RESERVE_S)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run_limited(command: list[str], limit_s: float, env: dict[str, str] | None = None) -> tuple[int | None, str]:
    """Run a command; returns its exit code, or None when it had to be ended, and the end of its output."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | (env or {}), stdout=log, stderr=subprocess.STDOUT, process_group=0
        )
        try:
            code: int | None = process.wait(timeout=max(limit_s, 1.0))
        except subprocess.TimeoutExpired:
            code = None
            end(process)
        log.seek(0)
        return code, log.read().decode(errors="replace")[-3000:]


def end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a process group, so that pytest still writes its report, and kill what is left of it."""
    for number, patience_s in ((signal.SIGINT, 15.0), (signal.SIGKILL, 30.0)):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(timeout=patience_s)


def child(kind: str, spec: dict[str, Any], limit_s: float, env: dict[str, str] | None = None) -> dict[str, Any]:
    """One of `CHILDREN` in a process of its own; a crash or a timeout is a result too."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        (Path(folder) / "spec.json").write_text(json.dumps(spec | {"limit_s": limit_s}))
        command = [sys.executable, str(Path(__file__).resolve()), "--child", kind, folder]
        begin = time.monotonic()
        code, output = run_limited(command, limit_s, env)
        seconds = {"seconds": time.monotonic() - begin}
        if code == 0 and result.exists():
            return json.loads(result.read_text()) | seconds
    status = "timed_out" if code is None else "crashed"
    say(f"{kind} {status}: exit code {code}\n{output}")
    return {"status": status, "exit_code": code, "output_end": output} | seconds


def run_tests(limit_s: float) -> dict[str, Any]:
    """The tests that need a GPU. A warning does not fail them here: other versions of torch warn of other things."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        options = ["-q", "-m", "gpu", "-W", "default", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
        command = [sys.executable, "-m", "pytest", *options, f"--junitxml={report}", "packages", "tests"]
        begin = time.monotonic()
        # Only plugins of this project's tests: others that happen to be installed may interfere.
        env = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1"}
        code, output = run_limited(command, limit_s, env)
        found: dict[str, Any] = {
            "status": "timed_out" if code is None else "ran",
            "exit_code": code,
            "seconds": time.monotonic() - begin,
            "limit_s": limit_s,
        }
        if not report.exists():
            return found | {"status": found["status"] if code is None else "crashed", "output_end": output}
        return found | junit(report) | {"output_end": output if code != 0 else ""}


def junit(report: Path) -> dict[str, Any]:
    """Counts of a JUnit file, and what failed."""
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
    """Try the case's sizes until one fits; what did not fit stays in `attempts`."""
    attempts: list[dict[str, Any]] = []
    tries = [(size, {}) for size in case.sizes]
    if options["device"] == "cuda":  # what failed for fragments alone may fit with an allocator that leaves none
        tries.append((case.sizes[-1], EXPANDABLE))
    head = {"case": case.name, "preset": case.preset, "attempts": attempts}
    for (micro_batch, seq_len), env in tries:
        left_s = budget.left_s()
        if left_s < case.needs_s:
            reason = f"{left_s:.0f} s of the budget are left, a try may need {case.needs_s:.0f}"
            return head | {"status": "skipped", "reason": reason}
        say(f"{case.name}: {case.preset}, micro_batch {micro_batch}, seq_len {seq_len} {env or ''}")
        spec = options | {"preset": case.preset, "micro_batch": micro_batch, "seq_len": seq_len}
        spec["sets"] = [*case.sets, *options["sets"]]
        found = child("train", spec, min(left_s, 2 * case.needs_s), env)
        size = {"micro_batch": micro_batch, "seq_len": seq_len, "allocator": env or "default"}
        estimate = memory(preset(case.preset), micro_batch=micro_batch, seq_len=seq_len)
        found.setdefault("memory", {})["estimate"] = asdict(estimate) | {"total": estimate.total}
        found = size | found
        if found["status"] == "ok":
            return head | found
        attempts.append(found)
        if found["status"] != "out_of_memory":
            return head | {"status": found["status"]}
        say(f"{case.name}: out of memory, {found['during']}")
        if found["during"] == OPENING:  # no smaller batch can help
            break
    return head | {"status": "out_of_memory"}


def with_mfu(row: dict[str, Any], matmul_peak: dict[str, Any] | None) -> dict[str, Any]:
    """The row with MFU in both conventions against the engine's peak and the measured one."""
    if row["status"] != "ok":
        return row
    peaks = row["peaks"] | {"matmul": matmul_peak}
    mfu = {
        convention: {
            name: row["flops_per_s"][convention] / peak["flops_per_s"] if peak else None for name, peak in peaks.items()
        }
        for convention in CONVENTIONS
    }
    return row | {"peaks": peaks, "mfu": mfu}


def measured_peak(products: dict[str, Any]) -> dict[str, Any] | None:
    """The peak of the first product of the list, or None when there is none."""
    if products["status"] != "ok":
        return None
    first = products["products"][0]
    source = f"measured, best of {first['repeats']} products {first['m']} x {first['k']} x {first['n']}"
    return {"flops_per_s": first["best_flops_per_s"], "source": f"{source} in {first['dtype']}"}


def shapes(cases: tuple[Case, ...], size: int) -> list[list[int]]:
    """`size`^3 first, then the products of each model: feed-forward up and down, attention, head (m, k, n)."""
    found = [[size, size, size]]
    for case in cases:
        config = preset(case.preset)
        tokens, width = min(case.sizes[0][0] * case.sizes[0][1], MOST_ROWS), config.hidden_size
        inner = config.intermediate_size
        found += [[tokens, width, inner], [tokens, inner, width], [tokens, width, width]]
        found.append([min(tokens, HEAD_ROWS), width, config.vocab_size])
    return found


def versions(commit: str | None) -> dict[str, Any]:
    """What ran: interpreter, packages and commit (the machine's part comes from the device)."""
    asked = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        found = done.stdout.strip() if done.returncode == 0 else ""
    except FileNotFoundError:
        found = ""
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
        "commit": commit or found or None,
    }


def table(report: dict[str, Any]) -> str:
    """The rows for a person."""
    lines = []
    for row in report["training"]:
        text = f"{row['case']}: {row['status']}"
        if row["status"] == "ok":
            mfu = ", ".join(f"{c} {v['engine']:.1%}" for c, v in row["mfu"].items())
            text += f", {row['micro_batch']} x {row['seq_len']}, {row['tokens_per_s']:.0f} tokens/s, MFU {mfu}"
            measured, planned = row["memory"].get("peak_allocated_bytes"), row["memory"]["plan"]["peak_bytes"]
            if measured:
                text += f", memory {measured / 2**30:.1f} GiB, planned {planned / 2**30:.1f} ({planned / measured:.2f})"
        lines.append(text)
    tests = report["tests"]
    lines.append(
        "tests: " + ", ".join(f"{k} {tests[k]}" for k in ("status", "passed", "failed", "skipped") if k in tests)
    )
    return "\n".join(lines)


def chosen(arguments: argparse.Namespace) -> tuple[Case, ...]:
    """The cases of the command line."""
    cases = QUICK if arguments.quick else CASES
    if arguments.models:
        known = {case.preset: case for case in cases}
        cases = tuple(
            known.get(name, Case(name=name, preset=name, sizes=QUICK[0].sizes, needs_s=QUICK[0].needs_s))
            for name in arguments.models.split(",")
        )
    if arguments.seq_len:
        cases = tuple(replace(c, sizes=tuple((m, arguments.seq_len) for m, _ in c.sizes)) for c in cases)
    if arguments.micro_batches:
        batches = [int(text) for text in arguments.micro_batches.split(",")]
        cases = tuple(replace(c, sizes=tuple((m, c.sizes[0][1]) for m in batches)) for c in cases)
    return cases


def benchmark(arguments: argparse.Namespace) -> dict[str, Any]:
    """All stages; the report is written after each."""
    budget, begin = Budget(arguments.budget_s), time.monotonic()
    cases = chosen(arguments)
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
        "versions": versions(arguments.commit),
        "options": options | {"budget_s": arguments.budget_s},
        "how": HOW,
        "tests": {"status": "skipped", "reason": "--no-tests"},
        "matmul": {"status": "skipped", "reason": "not reached"},
        "training": [],
    }

    def keep(**parts: Any) -> None:
        report.update(parts, seconds=time.monotonic() - begin)
        if arguments.out:
            arguments.out.write_text(json.dumps(report, indent=1) + "\n")

    keep(machine=child("facts", options, FACTS_AT_MOST_S))
    spec = options | {"shapes": shapes(cases, 256 if small else 8192)}
    keep(matmul=child("matmul", spec, MATMUL_AT_MOST_S))
    peak = measured_peak(report["matmul"])
    if not arguments.no_tests:
        left_s = budget.left_s() - sum(case.needs_s for case in cases)
        enough = left_s >= TESTS_S
        reason = {"status": "skipped", "reason": f"{left_s:.0f} s of the budget are free for them, not {TESTS_S:.0f}"}
        limit_s = min(left_s, TESTS_AT_MOST_S)
        say(f"tests, at most {limit_s:.0f} s" if enough else f"tests skipped: {reason['reason']}")
        keep(tests=run_tests(limit_s) if enough else reason)
    for case in cases:
        keep(training=[*report["training"], with_mfu(train_case(case, options, budget), peak)])
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
    report = benchmark(parser.parse_args())
    say(table(report))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
