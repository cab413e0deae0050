"""Folder contract between SageMaker and a training container, read completely before training starts.

    /opt/ml/input/config/hyperparameters.json    one map of strings; every value is a string
    /opt/ml/input/config/resourceconfig.json     current_host, hosts, network_interface_name
    /opt/ml/input/config/inputdataconfig.json    the channels and their modes
    /opt/ml/input/config/checkpointconfig.json   {"LocalPath": ...} when the job has checkpoints
    /opt/ml/input/data/CHANNEL                   data of a channel
    /opt/ml/checkpoints                          restored at each start, uploaded to S3 continuously
    /opt/ml/model                                uploaded to S3 at the end
    /opt/ml/output/failure                       its first 1024 characters become FailureReason

All paths are below one root, which tests can relocate.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lt_launch.errors import LaunchError

ROOT = Path("/opt/ml")
GRACE_PERIOD_S = 115.0
"""Grace period from SIGTERM to SIGKILL; the service kills everything after 120 s, and the failure must be written
before."""
RUN_CHANNEL = "run"
"""Channel with a writable file system: the run directory that all hosts share."""
FAILURE_REASON_LIMIT = 1024


@dataclass(frozen=True, kw_only=True)
class Contract:
    """Inputs that the service has placed below the root."""

    root: Path
    hyperparameters: Mapping[str, Any]
    channels: Mapping[str, Path]
    """Folder by channel name."""
    hosts: tuple[str, ...]
    """In the order of their numbers, so that adjacent ranks have adjacent names; the service sorts them as text. Rank 0
    is on the first."""
    current_host: str
    network_interface: str
    """Network interface that connects the hosts; empty if unknown."""
    instance_type: str
    master_addr: str
    checkpoint_dir: Path
    has_checkpoint_config: bool
    """True if the service uploads the checkpoint folder to S3 and restores it."""

    @property
    def node_rank(self) -> int:
        """Index of this host among the hosts."""
        return self.hosts.index(self.current_host)


def engine_of(instance_type: str) -> str:
    """Return the engine that trains on an instance type."""
    return "neuron" if instance_type.startswith("ml.trn") else "gpu"


def by_number(name: str) -> list[tuple[int, str]]:
    """Return a sort key that compares digits as numbers: algo-2 before algo-10."""
    return [(int(part or 0), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]


def read_contract(root: Path, environ: Mapping[str, str]) -> Contract:
    """Read and check all inputs that the service has written.

    Args:
        root: `/opt/ml`, or its replacement.
        environ: for SM_MASTER_ADDR, the address of rank 0's host where host names do not resolve (one machine).

    Raises:
        LaunchError: a file is missing or damaged, or a channel is missing or has an unsupported mode.
    """
    config = root / "input" / "config"
    checkpoints = _read_object(config / "checkpointconfig.json", default={})
    local_path = Path(str(checkpoints.get("LocalPath") or ROOT / "checkpoints"))
    resources = _read_object(config / "resourceconfig.json")
    hosts, current = resources.get("hosts"), resources.get("current_host")
    if not isinstance(hosts, list) or hosts.count(current) != 1 or not all(isinstance(host, str) for host in hosts):
        where = config / "resourceconfig.json"
        raise LaunchError(f"{where}: current_host = {current!r} must be exactly once in the names hosts = {hosts!r}")
    hosts.sort(key=by_number)
    return Contract(
        root=root,
        hyperparameters=_read_object(config / "hyperparameters.json", default={}),
        channels=_read_channels(root, _read_object(config / "inputdataconfig.json", default={})),
        hosts=tuple(hosts),
        current_host=str(current),
        network_interface=str(resources.get("network_interface_name") or ""),
        instance_type=str(resources.get("current_instance_type") or ""),
        master_addr=environ.get("SM_MASTER_ADDR") or (hosts[0] if len(hosts) > 1 else "127.0.0.1"),
        checkpoint_dir=root / local_path.relative_to(ROOT) if local_path.is_relative_to(ROOT) else local_path,
        has_checkpoint_config=bool(checkpoints),
    )


def _read_object(path: Path, *, default: dict[str, Any] | None = None) -> dict[str, Any]:
    if default is not None and not path.exists():
        return default
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        remedy = "run this in a SageMaker training container, or set --root to the folder used as /opt/ml"
        raise LaunchError(f"{path} is missing; {remedy}") from None
    except ValueError as exc:
        raise LaunchError(f"{path} is not valid JSON: {exc}") from exc
    if not isinstance(content, dict):
        raise LaunchError(f"{path} is {type(content).__name__}, not an object")
    return content


def _read_channels(root: Path, config: Mapping[str, Any]) -> dict[str, Path]:
    channels = {name: root / "input" / "data" / name for name in config}
    for name, folder in channels.items():
        if isinstance(config[name], dict) and config[name].get("TrainingInputMode") == "Pipe":
            raise LaunchError(
                f"channel {name} has the input mode Pipe, which cannot be read twice or in another order; "
                "use the input mode File or FastFile"
            )
        if not folder.is_dir():
            raise LaunchError(f"channel {name} is in inputdataconfig.json, but {folder} does not exist")
    return channels


def write_failure(root: Path, cause: str, lines: Sequence[str] = ()) -> None:
    """Write `output/failure` once, for the first failure: its cause, then as many of the last lines as fit.

    The failure itself is printed, too, so a file that cannot be written is no error.

    Args:
        root: `/opt/ml`, or its replacement.
        cause: one sentence: rank, host and exit code, or the problem of the input.
        lines: last output lines of the failed rank, oldest first.
    """
    text = cause if len(cause) <= FAILURE_REASON_LIMIT else cause[: FAILURE_REASON_LIMIT - 3] + "..."
    included: list[str] = []
    for line in reversed(lines):
        if len("\n".join([text, line, *included])) > FAILURE_REASON_LIMIT:
            break
        included.insert(0, line)
    path = root / "output" / "failure"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "x", encoding="utf-8", errors="backslashreplace") as file:
            file.write("\n".join([text, *included]))
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        return
