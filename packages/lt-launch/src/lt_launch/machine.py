"""Pure evaluation of a machine description (`look`) for a run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from lt_launch.job import Pipeline
from lt_launch.target import Finding

LOW_DISK_GIB, LOW_SHM_GIB = 20.0, 1.0
MIN_PYTHON = (3, 11)
ENGINE_PACKAGES = {"gpu": "lt-trainer-gpu", "neuron": "lt-trainer-neuron"}


def describe_machine(machine: Mapping[str, Any]) -> str:
    """Return a short description of a machine."""
    devices = machine["devices"]
    text = f"{machine['cpus']} cores, {machine['memory_gib']:.0f} GiB"
    return f"{text}, {len(devices)} x {devices[0]}" if devices else text


def machine_findings(machine: Mapping[str, Any], pipeline: Pipeline | None, *, host: str = "") -> Iterator[Finding]:
    """Yield the findings of one machine for a run."""
    training = [stage.job for stage in pipeline.stages if stage.job.is_training] if pipeline else []

    def finding(level: Literal["ok", "warning", "error"], check: str, detail: str, remedy: str = "") -> Finding:
        return Finding(level=level, check=check, detail=detail, remedy=remedy, host=host)

    text = f"{machine['python']} ({machine['executable']})"
    version = re.match(r"([0-9]{1,4})\.([0-9]{1,4})", machine["python"])
    if version is None or (int(version[1]), int(version[2])) < MIN_PYTHON:
        remedy = "set python in the profile to an interpreter of 3.11 or later, with lt-trainer in it"
        yield finding("error", "python", text, remedy)
    else:
        yield finding("ok", "python", text)

    packages, engines = machine["packages"], sorted({job.engine for job in training} & ENGINE_PACKAGES.keys())
    text = ", ".join(f"{name} {version}" for name, version in packages.items()) or "no lt package"
    needed = ["lt-trainer", *(ENGINE_PACKAGES[engine] for engine in engines)] if training else []
    if missing := [name for name in needed if name not in packages]:
        remedy = f"pip install {' '.join(missing)} into {machine['executable']}, or set python in the profile"
        yield finding("error", "packages", text, remedy)
    else:
        yield finding("ok", "packages", text)

    devices, procs = machine["devices"], max((job.procs_per_node for job in training), default=0)
    text = f"{len(devices)} x {devices[0]}" if devices else "none"
    text += f", driver {machine['driver']}" if machine["driver"] else ""
    if devices and procs > len(devices) and "Neuron" not in devices[0]:
        remedy = f"set --nproc-per-node to at most {len(devices)}"
        yield finding("error", "devices", f"{text}; {procs} processes", remedy)
    elif devices or not training:
        yield finding("ok", "devices", text)
    else:
        yield finding(
            "warning", "devices", text, "check the driver (nvidia-smi, neuron-ls), unless you train on the CPU"
        )

    text = f"{machine['free_gib']:.0f} GiB free in {machine['folder']}"
    if not machine["writable"]:
        yield finding("error", "disk", f"{machine['folder']} cannot be written", "choose --out")
    elif machine["free_gib"] < LOW_DISK_GIB:
        yield finding("warning", "disk", text, "free space, or choose --out on another disk")
    else:
        yield finding("ok", "disk", text)
    if training and machine["shm_gib"] < LOW_SHM_GIB:
        remedy = "give it more (docker run --shm-size=16g)"
        yield finding("warning", "/dev/shm", f"{machine['shm_gib']:.1f} GiB", remedy)
    if machine["efa"]:
        yield finding("ok", "EFA", "fi_info finds it")
        if machine["memlock"] != "unlimited":
            remedy = "set memlock to unlimited in /etc/security/limits.conf: EFA pins memory"
            yield finding("error", "memlock", str(machine["memlock"]), remedy)
