"""Training benchmark of the torch engine on one GPU: tokens per second, MFU, memory, fp8, a plain FSDP2 step beside it.

    python tools/bench/gpu.py --out gpu.json                      # at most 8 minutes; again until it exits with 0
    python tools/bench/gpu.py --out gpu.json --limit-s 7200       # all of it at once
    python tools/bench/gpu.py --out gpu.json --stage 8b           # one stage (repeatable)
    python tools/bench/gpu.py --device cpu --quick                # tries the script on a CPU

Works through the stages in order and writes the JSON after every result. A run starts nothing that the rest of its
time may not suffice for; it exits with 3 while something remains, and the same command goes on. The JSON is the last
line of stdout, progress and the marks are on stderr. `gpu_cases.py` has the cases and the marks, `gpu_worker.py` what
is measured. Needs no network and no torchao.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from gpu_cases import QUICK_STAGES, STAGES, Case, Try, compare_with_marks, list_tries
from gpu_runs import (
    KEPT_CHARACTERS,
    REMAINS_EXIT_CODE,
    Report,
    Task,
    describe_machine,
    exit_on_sigterm,
    limit_of_tries,
    log,
    run_for_result,
    run_with_timeout,
    software_versions,
)

from lt_model import preset

TESTS_S, MATMUL_S, FACTS_S = 360.0, 60.0, 60.0
MATMUL_PRESETS = ("llama3.2-1b", "llama3-8b")
MATMUL_TOKENS, HEAD_TOKENS = 32768, 1024
"""Rows of the block products, and of the head's: the loss computes it on about a thousand tokens at a time."""


def run_child(kind: str, spec: dict[str, Any], limit_s: float) -> dict[str, Any]:
    """Run a child of gpu_worker.py in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="lt-bench-") as folder:
        return run_for_result("gpu_worker.py", spec | {"kind": kind}, Path(folder), limit_s)


def run_tests(limit_s: float) -> dict[str, Any]:
    """Run the tests that need a GPU; warnings are not errors, since they vary with the torch version."""
    options = ["-q", "-m", "gpu", "-W", "default", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    code, output = run_with_timeout([sys.executable, "-m", "pytest", *options, "packages", "tests"], limit_s)
    status = "timed_out" if code is None else "ok" if code in (0, 1) else "crashed"
    return {"status": status, "exit_code": code, "output_end": output[-KEPT_CHARACTERS:]}


def run_case(case: Case, options: dict[str, Any], memory_bytes: int | None, limit_s: float) -> dict[str, Any]:
    """Try the case's sizes until one fits; the others are listed in `attempts`."""
    begin, attempts = time.monotonic(), []
    head = {"preset": case.preset, "attempts": attempts}
    kind = "steps" if case.curve_seed is None else "losses"
    for size in list_tries(case, memory_bytes):
        left_s = limit_s - (time.monotonic() - begin)
        if attempts and left_s < case.limit_s / 2:
            return head | {"status": "timed_out"}
        log(f"  {case.preset}, {size}")
        found = asdict(size) | run_child(kind, case_spec(case, size, options), min(left_s, case.limit_s))
        if found["status"] != "out_of_memory":
            return head | found
        attempts.append(found)
        log(f"  out of memory, {found.get('during')}")
        if found.get("during") == "opening" and not case.shares:  # no smaller batch can help
            break
    return head | {"status": "out_of_memory"}


def case_spec(case: Case, size: Try, options: dict[str, Any]) -> dict[str, Any]:
    """Return the values for the child of a try."""
    own = {name: getattr(case, name) for name in ("preset", "document_tokens", "plain", "curve_seed")}
    return options | own | asdict(size) | {"sets": [*case.sets, *options["sets"]]}


def add_mfu(row: dict[str, Any], report: Report) -> dict[str, Any]:
    """Return an engine's row with its MFU in both conventions against the engine's peak and the best product."""
    products = (report.find("device", "matmul") or {}).get("products")
    peaks = {name: peak["flops_per_s"] for name, peak in row.get("peaks", {}).items()}
    if peaks and products:
        peaks["matmul"] = products[0]["best_flops_per_s"]
    flops = row.get("flops_per_s", {}).items()
    return row | {"mfu": {name: {key: value / peak for key, value in flops} for name, peak in peaks.items()}}


def matmul_shapes(size: int) -> list[list[int]]:
    """Return (m, k, n) of `size`^3, then of each model: feed-forward up and down, attention, head."""
    found = [[size, size, size]]
    for name in MATMUL_PRESETS:
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
            text += "".join(f", MFU of {name} {value['full']:.1%}" for name, value in row["mfu"].items())
            if "peak_allocated_bytes" in row["memory"]:
                peak, planned = (row["memory"][f"{name}_bytes"] / 2**30 for name in ("peak_allocated", "planned"))
                text += f", memory {peak:.1f} GiB, planned {planned:.1f}"
        if "tail" in row:
            text += f", loss {row['tail']:.4f}"
        if row["stage"] == "tests":
            text += f", {row['output_end'].strip().rpartition(chr(10))[2]}"
        lines.append(text)
    for mark in report.content["marks"]:
        verdict = "no mark" if mark["met"] is None else f"mark {mark['mark']:g}: {'met' if mark['met'] else 'NOT MET'}"
        lines.append(f"{mark['name']}: {mark['value']:.4g}, {verdict}")
    return "\n".join(lines)


def list_tasks(arguments: argparse.Namespace, report: Report, options: dict[str, Any]) -> list[Task]:
    """Return the tasks of all stages."""
    memory_bytes = report.content["machine"].get("memory_bytes")
    spec = options | {"shapes": [[256, 256, 256]] if arguments.quick else matmul_shapes(8192)}
    tasks = [Task(stage="device", name="matmul", limit_s=MATMUL_S, run=partial(run_child, "matmul", spec))]
    if not arguments.quick:
        tasks.append(Task(stage="tests", name="tests", limit_s=TESTS_S, run=run_tests))

    def measure(case: Case, limit_s: float) -> dict[str, Any]:
        return add_mfu(run_case(case, options, memory_bytes, limit_s), report)

    for stage, cases in (QUICK_STAGES if arguments.quick else STAGES).items():
        for case in cases:
            tries = len(case.sizes) * max(1, len(case.shares))
            limit_s = limit_of_tries(case.limit_s, tries, arguments.limit_s)
            tasks.append(Task(stage=stage, name=case.name, limit_s=limit_s, run=partial(measure, case)))
    return tasks


def main() -> None:
    """Run what remains of the chosen stages."""
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
    begin, quick = time.monotonic(), arguments.quick
    options = {
        "device": arguments.device,
        "warmup": 1 if quick else 4,
        "steps": 3 if quick else 12,
        "curve_steps": 4 if quick else 200,
        "memory_limit_gib": arguments.memory_limit_gib,
        "sets": arguments.set,
    }
    machine = run_child("facts", options, FACTS_S)
    if machine["status"] != "ok":
        raise SystemExit(machine.get("output_end") or "no facts of the device in time")
    head = {"benchmark": "gpu", "versions": software_versions(arguments.commit), "options": options, "marks": []}
    report = Report(arguments.out, head, machine)
    tasks = list_tasks(arguments, report, options)
    chosen = [task for task in tasks if not arguments.stage or task.stage in arguments.stage]
    left_s = arguments.limit_s - (time.monotonic() - begin)
    remaining = report.run(chosen, left_s, retry=arguments.retry)
    report.content["marks"] = compare_with_marks(report.rows)
    report.content["complete"] = all(report.find(task.stage, task.name) for task in tasks)
    report.write()
    log(format_report(report))
    print(json.dumps(report.content))
    if remaining:
        log(f"{len(remaining)} results remain: run the same command again")
        raise SystemExit(REMAINS_EXIT_CODE)


if __name__ == "__main__":
    main()
