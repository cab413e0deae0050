"""Description of a machine for `doctor`, from one file that imports nothing of ours and is sent alone."""

import os
import shutil
import socket
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

PACKAGES = ("lt-launch", "lt-trainer", "lt-trainer-gpu", "lt-trainer-neuron", "torch", "numpy", "neuronx-distributed")


def said(*command: str) -> str:
    """Return what a command prints; empty where there is no such command or it fails."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else ""


def installed() -> dict[str, Any]:
    """Return the versions of the packages that matter, by name."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def look(folder: str, token: str = "") -> dict[str, Any]:
    """Describe this machine as plain values.

    Args:
        folder: where the run will write; its nearest parent that exists is looked at.
        token: name of a file that another host has just made in that folder.
    """
    import resource

    place = os.path.abspath(folder or ".")
    while not os.path.isdir(place):
        place = os.path.dirname(place)
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    gpus = said("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").splitlines()
    return {
        "host": socket.gethostname(),
        "time": time.time(),
        "python": ".".join(str(part) for part in sys.version_info[:3]),
        "executable": sys.executable,
        "cpus": os.cpu_count(),
        "memory_gib": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30,
        "devices": [line.split(",")[0].strip() for line in gpus] or ["Neuron device"] * neuron_devices(),
        "driver": gpus[0].split(",")[1].strip() if gpus else "",
        "efa": "provider: efa" in said("fi_info", "-p", "efa"),
        "folder": place,
        "writable": os.access(place, os.W_OK),
        "free_gib": shutil.disk_usage(place).free / 2**30,
        "sees_token": bool(token) and os.path.exists(os.path.join(folder, token)),
        "shm_gib": shutil.disk_usage("/dev/shm").total / 2**30 if os.path.isdir("/dev/shm") else 0.0,
        "memlock": "unlimited" if limit == resource.RLIM_INFINITY else str(limit),
        "packages": installed(),
    }


def neuron_devices() -> int:
    """Count the Neuron devices of the machine."""
    try:
        return sum(1 for name in os.listdir("/dev") if name.startswith("neuron") and name[6:].isdigit())
    except OSError:
        return 0
