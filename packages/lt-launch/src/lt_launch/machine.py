"""What one machine's description (`agent.look`) means for a run; pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lt_launch.backend import Finding
from lt_launch.job import Pipeline

__all__ = ["describe", "findings"]

LITTLE_DISK_GIB, LITTLE_SHM_GIB = 20.0, 1.0
MIN_PYTHON = (3, 11)
ENGINES = {"gpu": "lt-trainer-gpu", "neuron": "lt-trainer-neuron"}


def describe(found: Mapping[str, Any]) -> str:
    """A machine in a few words."""
    devices = found["devices"]
    text = f"{found['cpus']} cores, {found['memory_gib']:.0f} GiB"
    return f"{text}, {len(devices)} x {devices[0]}" if devices else text


def findings(found: Mapping[str, Any], pipeline: Pipeline | None, *, where: str = "") -> Iterator[Finding]:
    """What is right and wrong with one machine for a run."""
    training = [stage.job for stage in pipeline.stages if stage.job.trains] if pipeline else []
    yield _python(found, where)
    yield from _packages(found, {job.engine for job in training}, where)
    yield from _devices(found, max((job.procs_per_node for job in training), default=0), training, where)
    yield _disk(found, where)
    if training and found["shm_gib"] < LITTLE_SHM_GIB:
        remedy = "give it more (docker run --shm-size=16g)"
        yield Finding(level="warning", what="/dev/shm", found=f"{found['shm_gib']:.1f} GiB", remedy=remedy, where=where)
    if found["efa"]:
        yield Finding(level="ok", what="EFA", found="fi_info finds it", where=where)
        if found["memlock"] != "unlimited":
            remedy = "set memlock to unlimited in /etc/security/limits.conf: EFA pins memory"
            yield Finding(level="wrong", what="memlock", found=str(found["memlock"]), remedy=remedy, where=where)


def _python(found: Mapping[str, Any], where: str) -> Finding:
    text = f"{found['python']} ({found['executable']})"
    if tuple(int(part) for part in found["python"].split(".")[:2]) < MIN_PYTHON:
        remedy = "set python in the profile to an interpreter of 3.11 or later, with lt-trainer in it"
        return Finding(level="wrong", what="python", found=text, remedy=remedy, where=where)
    return Finding(level="ok", what="python", found=text, where=where)


def _packages(found: Mapping[str, Any], engines: set[str], where: str) -> Iterator[Finding]:
    packages = found["packages"]
    text = ", ".join(f"{name} {version}" for name, version in packages.items()) or "none of ours"
    missing = [
        name for name in ("lt-trainer", *(ENGINES[e] for e in sorted(engines) if e in ENGINES)) if name not in packages
    ]
    if engines and missing:
        remedy = f"pip install {' '.join(missing)} into {found['executable']}, or set python in the profile"
        yield Finding(level="wrong", what="packages", found=text, remedy=remedy, where=where)
    else:
        yield Finding(level="ok", what="packages", found=text, where=where)


def _devices(found: Mapping[str, Any], procs: int, training: list[Any], where: str) -> Iterator[Finding]:
    devices = found["devices"]
    text = (
        f"{len(devices)} x {devices[0]}" + (f", driver {found['driver']}" if found["driver"] else "")
        if devices
        else "none"
    )
    if devices and procs > len(devices) and "Neuron" not in devices[0]:
        remedy = f"set --nproc-per-node to at most {len(devices)}"
        yield Finding(level="wrong", what="devices", found=f"{text}; {procs} processes", remedy=remedy, where=where)
    elif devices or not training:
        yield Finding(level="ok", what="devices", found=text, where=where)
    else:
        remedy = "check the driver (nvidia-smi, neuron-ls), or mean to train on the CPU"
        yield Finding(level="warning", what="devices", found=text, remedy=remedy, where=where)


def _disk(found: Mapping[str, Any], where: str) -> Finding:
    text = f"{found['free_gib']:.0f} GiB free in {found['folder']}"
    if not found["writable"]:
        return Finding(
            level="wrong", what="disk", found=f"{found['folder']} cannot be written", remedy="choose --out", where=where
        )
    level = "warning" if found["free_gib"] < LITTLE_DISK_GIB else "ok"
    remedy = "free space, or choose --out on another disk" if level == "warning" else ""
    return Finding(level=level, what="disk", found=text, remedy=remedy, where=where)
