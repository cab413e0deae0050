"""Pure evaluation of a machine description (`look`) for a run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

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
    yield _check_python(machine, host)
    yield from _check_packages(machine, {job.engine for job in training}, host)
    yield from _check_devices(machine, max((job.procs_per_node for job in training), default=0), training, host)
    yield _check_disk(machine, host)
    if training and machine["shm_gib"] < LOW_SHM_GIB:
        remedy = "give it more (docker run --shm-size=16g)"
        yield Finding(
            level="warning", check="/dev/shm", detail=f"{machine['shm_gib']:.1f} GiB", remedy=remedy, host=host
        )
    if machine["efa"]:
        yield Finding(level="ok", check="EFA", detail="fi_info finds it", host=host)
        if machine["memlock"] != "unlimited":
            remedy = "set memlock to unlimited in /etc/security/limits.conf: EFA pins memory"
            yield Finding(level="error", check="memlock", detail=str(machine["memlock"]), remedy=remedy, host=host)


def _check_python(machine: Mapping[str, Any], host: str) -> Finding:
    text = f"{machine['python']} ({machine['executable']})"
    version = re.match(r"([0-9]{1,4})\.([0-9]{1,4})", machine["python"])
    if version is None or (int(version[1]), int(version[2])) < MIN_PYTHON:
        remedy = "set python in the profile to an interpreter of 3.11 or later, with lt-trainer in it"
        return Finding(level="error", check="python", detail=text, remedy=remedy, host=host)
    return Finding(level="ok", check="python", detail=text, host=host)


def _check_packages(machine: Mapping[str, Any], engines: set[str], host: str) -> Iterator[Finding]:
    packages = machine["packages"]
    text = ", ".join(f"{name} {version}" for name, version in packages.items()) or "no lt package"
    missing = [
        name
        for name in ("lt-trainer", *(ENGINE_PACKAGES[e] for e in sorted(engines) if e in ENGINE_PACKAGES))
        if name not in packages
    ]
    if engines and missing:
        remedy = f"pip install {' '.join(missing)} into {machine['executable']}, or set python in the profile"
        yield Finding(level="error", check="packages", detail=text, remedy=remedy, host=host)
    else:
        yield Finding(level="ok", check="packages", detail=text, host=host)


def _check_devices(machine: Mapping[str, Any], procs: int, training: list[Any], host: str) -> Iterator[Finding]:
    devices = machine["devices"]
    text = (
        f"{len(devices)} x {devices[0]}" + (f", driver {machine['driver']}" if machine["driver"] else "")
        if devices
        else "none"
    )
    if devices and procs > len(devices) and "Neuron" not in devices[0]:
        remedy = f"set --nproc-per-node to at most {len(devices)}"
        yield Finding(level="error", check="devices", detail=f"{text}; {procs} processes", remedy=remedy, host=host)
    elif devices or not training:
        yield Finding(level="ok", check="devices", detail=text, host=host)
    else:
        remedy = "check the driver (nvidia-smi, neuron-ls), unless you train on the CPU"
        yield Finding(level="warning", check="devices", detail=text, remedy=remedy, host=host)


def _check_disk(machine: Mapping[str, Any], host: str) -> Finding:
    text = f"{machine['free_gib']:.0f} GiB free in {machine['folder']}"
    if not machine["writable"]:
        return Finding(
            level="error",
            check="disk",
            detail=f"{machine['folder']} cannot be written",
            remedy="choose --out",
            host=host,
        )
    level = "warning" if machine["free_gib"] < LOW_DISK_GIB else "ok"
    remedy = "free space, or choose --out on another disk" if level == "warning" else ""
    return Finding(level=level, check="disk", detail=text, remedy=remedy, host=host)
