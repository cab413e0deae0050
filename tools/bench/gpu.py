"""Training benchmark of the torch engine on one GPU: tokens per second, MFU, memory, fp8, a plain FSDP2 step beside it.

    python tools/bench/gpu.py --out gpu.json                      # at most 8 minutes; again until it exits with 0
    python tools/bench/gpu.py --out gpu.json --limit-s 7200       # all of it at once
    python tools/bench/gpu.py --out gpu.json --stage 8b           # one stage (repeatable)
    python tools/bench/gpu.py --device cpu --quick                # tries the script on a CPU

Works through the stages in order and writes the JSON after every result. A run starts nothing that the rest of its
time may not suffice for; it exits with 3 while something remains, and the same command goes on. The JSON is the last
line of stdout, progress and the marks are on stderr. `gpu_cases.py` has the cases, the marks and the definition of each
field. Every try is a process of its own, so that running out of memory or crashing ends nothing else and all memory is
freed. Needs no network and no torchao.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from gpu_cases import METHODS, QUICK_STAGES, STAGES, Case, Try, case_model, compare_with_marks, list_tries
from gpu_losses import measure_losses
from gpu_processes import KEPT_CHARACTERS, Budget, exit_on_sigterm, log, run_for_result, run_with_timeout
from gpu_report import REMAINS_EXIT_CODE, Report, Task, describe_machine, limit_of_tries, run_tasks, software_versions
from gpu_worker import OPENING_STAGE, device_info, matmul, train, train_plain

from lt_model import preset
from lt_model.costs import FLOPS_CONVENTIONS, estimate_memory

TESTS_S, MATMUL_S, FACTS_S = 360.0, 60.0, 60.0
MATMUL_PRESETS = ("llama3.2-1b", "llama3-8b")
MATMUL_TOKENS, HEAD_TOKENS = 32768, 1024
"""Rows of the block products, and of the head's: the loss computes it on about a thousand tokens at a time."""
CURVE_STEPS, QUICK_CURVE_STEPS = 200, 4
CHILDREN = {
    "facts": device_info,
    "matmul": matmul,
    "train": train,
    "plain": train_plain,
    "losses": measure_losses,
}


def run_child(kind: str, spec: dict[str, Any], limit_s: float) -> dict[str, Any]:
    """Run one of `CHILDREN` in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="lt-bench-") as folder:
        command = [sys.executable, str(Path(__file__).resolve()), "--child", kind]
        return run_for_result(command, spec, Path(folder), limit_s)


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
            "status": "timed_out" if code is None else "ok",
            "exit_code": code,
            "seconds": time.monotonic() - begin,
            "output_end": output[-KEPT_CHARACTERS:] if code else "",
        }
        if not report.exists():
            return found | {"status": "timed_out" if code is None else "crashed"}
        return found | parse_junit(report)


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


def run_case(case: Case, options: dict[str, Any], memory_bytes: int | None, limit_s: float) -> dict[str, Any]:
    """Try the case's sizes until one fits; the others are listed in `attempts`."""
    begin, attempts = time.monotonic(), []
    head = {"preset": case.preset, "attempts": attempts}
    for size in list_tries(case, memory_bytes):
        left_s = limit_s - (time.monotonic() - begin)
        if attempts and left_s < case.limit_s / 2:
            return head | {"status": "timed_out"}
        log(f"  {case.preset}, {size}")
        found = run_child(child_kind(case), case_spec(case, size, options), min(left_s, case.limit_s))
        estimate = estimate_memory(
            case_model(case, size.n_layers), micro_batch_size=size.micro_batch_size, seq_len=size.seq_len
        )
        found.setdefault("memory", {})["estimate"] = asdict(estimate) | {"total": estimate.total}
        found = asdict(size) | found
        if found["status"] != "out_of_memory":
            return head | found
        attempts.append(found)
        log(f"  out of memory, {found.get('during')}")
        if found.get("during") == OPENING_STAGE and not case.shares:  # no smaller batch can help
            break
    return head | {"status": "out_of_memory"}


def child_kind(case: Case) -> str:
    """Return the child that measures a case."""
    if case.curve_seed is not None:
        return "losses"
    return "plain" if case.plain else "train"


def case_spec(case: Case, size: Try, options: dict[str, Any]) -> dict[str, Any]:
    """Return the values for the child of a try."""
    own = {name: getattr(case, name) for name in ("preset", "document_tokens", "plain", "curve_seed")}
    return options | own | asdict(size) | {"sets": [*case.sets, *options["sets"]]}


def add_mfu(row: dict[str, Any], matmul_peak: dict[str, Any] | None) -> dict[str, Any]:
    """Return an engine's row with MFU in both conventions against the engine's peak and the measured one."""
    if "peaks" not in row:
        return row
    peaks = row["peaks"] | {"matmul": matmul_peak}
    mfu = {
        convention: {
            name: row["flops_per_s"][convention] / peak["flops_per_s"] if peak else None for name, peak in peaks.items()
        }
        for convention in FLOPS_CONVENTIONS
    }
    return row | {"peaks": peaks, "mfu": mfu}


def measured_peak_flops(report: Report) -> dict[str, Any] | None:
    """Return the peak of the first product, or None before it was measured."""
    products = report.find("device", "matmul")
    if products is None or products["status"] != "ok":
        return None
    first = products["products"][0]
    source = f"measured, best of {first['repeats']} products {first['m']} x {first['k']} x {first['n']}"
    return {"flops_per_s": first["best_flops_per_s"], "source": f"{source} in {first['dtype']}"}


def matmul_shapes(presets: tuple[str, ...], size: int) -> list[list[int]]:
    """Return (m, k, n) of `size`^3, then of each model: feed-forward up and down, attention, head."""
    found = [[size, size, size]]
    for name in presets:
        config = preset(name)
        width, inner = config.hidden_size, config.intermediate_size
        found += [[MATMUL_TOKENS, width, inner], [MATMUL_TOKENS, inner, width], [MATMUL_TOKENS, width, width]]
        found.append([HEAD_TOKENS, width, config.vocab_size])
    return found


def format_report(report: Report) -> str:
    """Format the results and the marks for display."""
    lines = [describe_machine(report.content["machine"])]
    for row in report.rows:
        text = f"{row['stage']}: {row['case']}: {row['status']}"
        if "tokens_per_s" in row:
            text += f", {row['n_layers']} layers, {row['micro_batch_size']} x {row['seq_len']}"
            text += f", {row['tokens_per_s']:.0f} tokens/s"
        if "mfu" in row:
            text += ", MFU " + ", ".join(f"{name} {value['engine']:.1%}" for name, value in row["mfu"].items())
        memory = row.get("memory", {})
        if "peak_allocated_bytes" in memory:
            text += f", memory {memory['peak_allocated_bytes'] / 2**30:.1f} GiB"
            if "plan" in memory:
                text += f", planned {memory['plan']['peak_bytes'] / 2**30:.1f}"
        if "tail" in row:
            text += f", loss {row['tail']:.4f}"
        if "passed" in row:
            text += ", " + ", ".join(f"{name} {row[name]}" for name in ("passed", "failed", "errors", "skipped"))
        lines.append(text)
    for mark in report.content["marks"]:
        verdict = "no mark" if mark["met"] is None else f"mark {mark['mark']:g}: {'met' if mark['met'] else 'NOT MET'}"
        layers = f" ({mark['n_layers']} layers)" if "n_layers" in mark else ""
        lines.append(f"{mark['name']}{layers}: {mark['value']:.4g}, {verdict}")
    return "\n".join(lines)


def list_tasks(
    arguments: argparse.Namespace, report: Report, options: dict[str, Any], memory_bytes: int | None
) -> list[Task]:
    """Return the tasks of all stages."""
    shapes = [[256, 256, 256]] if arguments.quick else matmul_shapes(MATMUL_PRESETS, 8192)
    spec = options | {"shapes": shapes}
    tasks = [Task(stage="device", name="matmul", limit_s=MATMUL_S, run=partial(run_child, "matmul", spec))]
    if not arguments.quick:
        tasks.append(Task(stage="tests", name="tests", limit_s=TESTS_S, run=run_tests))

    def measure(case: Case, limit_s: float) -> dict[str, Any]:
        return add_mfu(run_case(case, options, memory_bytes, limit_s), measured_peak_flops(report))

    for stage, cases in (QUICK_STAGES if arguments.quick else STAGES).items():
        for case in cases:
            tries = len(case.sizes) * max(1, len(case.shares))
            limit_s = limit_of_tries(case.limit_s, tries, arguments.limit_s)
            tasks.append(Task(stage=stage, name=case.name, limit_s=limit_s, run=partial(measure, case)))
    return tasks


def run_benchmark(arguments: argparse.Namespace) -> tuple[Report, list[str]]:
    """Run what remains of the chosen stages; return the report, and the names of what still remains."""
    budget, quick = Budget(arguments.limit_s), arguments.quick
    options = {
        "device": arguments.device,
        "warmup": 1 if quick else 4,
        "steps": 3 if quick else 12,
        "curve_steps": QUICK_CURVE_STEPS if quick else CURVE_STEPS,
        "memory_limit_gib": arguments.memory_limit_gib,
        "sets": arguments.set,
    }
    machine = run_child("facts", options, FACTS_S)
    if machine["status"] != "ok":
        raise SystemExit(machine.get("output_end") or "no facts of the device in time")
    head = {
        "benchmark": "gpu",
        "versions": software_versions(arguments.commit),
        "options": options,
        "how": METHODS,
        "marks": [],
    }
    report = Report(arguments.out, head, machine)
    if arguments.retry:
        report.forget_failures()
    tasks = list_tasks(arguments, report, options, machine.get("memory_bytes"))
    chosen = [task for task in tasks if not arguments.stage or task.stage in arguments.stage]
    remaining = run_tasks(report, chosen, budget)
    report.content["marks"] = compare_with_marks(report.rows)
    report.content["complete"] = all(report.find(task.stage, task.name) for task in tasks)
    report.write()
    return report, remaining


def main() -> None:
    """Run as the benchmark, or as one of its children."""
    if sys.argv[1:2] == ["--child"]:
        kind, folder = sys.argv[2], Path(sys.argv[3])
        result = CHILDREN[kind](json.loads((folder / "spec.json").read_text()))
        (folder / "result.json").write_text(json.dumps(result))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file, written after every result and continued")
    parser.add_argument("--limit-s", type=float, default=480.0, help="seconds of this run, at least 480 for all stages")
    names = ["device", "tests", *dict.fromkeys([*STAGES, *QUICK_STAGES])]
    parser.add_argument("--stage", action="append", default=[], choices=names, help="only this stage; repeatable")
    parser.add_argument("--retry", action="store_true", help="run crashes and timeouts of earlier runs again")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="a tiny model and small products: tries the script itself")
    parser.add_argument("--memory-limit-gib", type=float, default=0.0, help="as if the device had only this much")
    parser.add_argument("--set", action="append", default=[], help="recipe override such as engine.gpu.dtype=float32")
    parser.add_argument("--commit", help="commit to note where there is no git")
    arguments = parser.parse_args()
    exit_on_sigterm()
    report, remaining = run_benchmark(arguments)
    log(format_report(report))
    print(json.dumps(report.content))
    if remaining:
        log(f"{len(remaining)} results remain: run the same command again")
        raise SystemExit(REMAINS_EXIT_CODE)


if __name__ == "__main__":
    main()
