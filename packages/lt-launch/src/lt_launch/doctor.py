"""`lt launch doctor`: findings of a target with remedies, and what a machine's description (`look`) means for a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lt_ckpt.terminal_text import echo, escape_controls
from lt_launch.job import Pipeline
from lt_launch.run_file import RunFile
from lt_launch.target import Finding, get_target

LOW_DISK_GIB = 20.0
MIN_PYTHON = (3, 11)
ENGINE_PACKAGES = {"gpu": "lt-trainer-gpu", "neuron": "lt-trainer-neuron"}


def run_doctor(on: str, run_file: RunFile) -> int:
    """Print the findings; return 64 if one is a problem, else 0."""
    target, found = get_target(on), []
    rendered = target.render(run_file.pipeline, run_file.profile)
    echo(f"ok render: {len(rendered.files)} files, {len(rendered.commands)} commands")
    for finding in target.doctor(run_file.profile, run_file.pipeline):
        host = f"{finding.host}: " if finding.host else ""
        remedy = f"; {finding.remedy}" if finding.remedy else ""
        echo(escape_controls(f"{finding.level} {host}{finding.check}: {finding.detail}{remedy}", keep=""))
        found.append(finding.level)
    return 64 if "error" in found else 0


def machine_findings(machine: Mapping[str, Any], pipeline: Pipeline, *, host: str = "") -> Iterator[Finding]:
    """Yield the findings of one machine for a run, from its description."""

    def finding(check: str, detail: str, error: str = "", warning: str = "") -> Finding:
        """Return a finding; `error` and `warning` are remedies."""
        level = "error" if error else "warning" if warning else "ok"
        return Finding(level=level, check=check, detail=detail, remedy=error or warning, host=host)

    training = [stage.job for stage in pipeline.stages if stage.job.is_training]
    python, executable = machine["python"], machine["executable"]
    is_old = tuple(int(part) for part in python.split(".")[:2]) < MIN_PYTHON
    remedy = "set python in the profile to an interpreter of 3.11 or later, with lt-trainer in it"
    yield finding("python", f"{python} ({executable})", remedy if is_old else "")

    packages, engines = machine["packages"], {job.engine for job in training} & ENGINE_PACKAGES.keys()
    needed = ["lt-trainer", *(ENGINE_PACKAGES[engine] for engine in sorted(engines))] if training else []
    missing = " ".join(name for name in needed if name not in packages)
    text = ", ".join(f"{name} {version}" for name, version in packages.items()) or "no lt package"
    remedy = f"pip install {missing} into {executable}, or set python in the profile"
    yield finding("packages", text, remedy if missing else "")

    devices, procs = machine["devices"], max((job.procs_per_node for job in training), default=0)
    text = f"{devices} for {procs} processes" + (f" ({machine['driver']})" if machine["driver"] else "")
    remedy = f"set --nproc-per-node to at most {devices}" if 0 < devices < procs else ""
    none = "check the driver (nvidia-smi, neuron-ls), unless you train on the CPU" if training and not devices else ""
    yield finding("devices", text, remedy, none)

    folder, free_gib = machine["folder"], machine["free_gib"]
    remedy = "choose --out on a disk with room that you may write"
    error, warning = not machine["writable"], free_gib < LOW_DISK_GIB
    yield finding("disk", f"{free_gib:.0f} GiB free in {folder}", remedy if error else "", remedy if warning else "")
