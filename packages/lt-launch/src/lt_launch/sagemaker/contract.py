"""The folder contract between SageMaker and a training container, read whole before anything is started.

    /opt/ml/input/config/hyperparameters.json    one map of strings; every value is a string
    /opt/ml/input/config/resourceconfig.json     current_host, hosts, network_interface_name
    /opt/ml/input/config/inputdataconfig.json    the channels and their modes
    /opt/ml/input/config/checkpointconfig.json   {"LocalPath": ...} when the job has checkpoints
    /opt/ml/input/data/CHANNEL                   what a channel brings
    /opt/ml/checkpoints                          restored at each start, sent to S3 all the time
    /opt/ml/model                                sent to S3 at the end
    /opt/ml/output/failure                       its first 1024 characters become FailureReason

The service lists hosts in the order of strings (algo-10 before algo-2); `Cluster.hosts` is in the order of numbers, so
that neighbours in rank are neighbours in name. All paths hang below one root, so the contract can be kept anywhere.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lt_launch.sagemaker.errors import SageMakerError

__all__ = ["ROOT", "Cluster", "Contract", "natural_order", "read"]

ROOT = Path("/opt/ml")
DIGITS = re.compile(r"(\d+)")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The hosts of a job, first the one that rank 0 lives on."""

    current_host: str
    hosts: tuple[str, ...]
    interface: str = ""
    """Network interface that connects the hosts; empty where the service does not say."""
    instance_type: str = ""
    master: str = ""
    """Address of the first host, where its name means nothing; empty = its name."""

    @property
    def node_rank(self) -> int:
        """This host's place among the hosts."""
        return self.hosts.index(self.current_host)

    @property
    def master_address(self) -> str:
        """Where rank 0 listens: with one host nobody else has to find it."""
        return self.master or (self.hosts[0] if len(self.hosts) > 1 else "127.0.0.1")


@dataclass(frozen=True, kw_only=True)
class Contract:
    """What the service has put below the root, and where it looks for results."""

    root: Path
    hyperparameters: Mapping[str, Any]
    channels: Mapping[str, Path]
    """Folder by channel name."""
    cluster: Cluster
    checkpoints: Path
    checkpoints_kept: bool
    """Whether the job says that the service sends the checkpoint folder to S3 and restores it."""

    @property
    def model(self) -> Path:
        """Folder of the trained model."""
        return self.root / "model"

    @property
    def failure(self) -> Path:
        """File whose beginning becomes FailureReason."""
        return self.root / "output" / "failure"

    @property
    def output_data(self) -> Path:
        """Folder of other output."""
        return self.root / "output" / "data"


def natural_order(name: str) -> tuple[tuple[int, int, str], ...]:
    """A key that sorts algo-2 before algo-10; text stays in the order of strings."""
    parts = DIGITS.split(name)
    return tuple((1, int(part), part) if part.isdigit() else (0, 0, part) for part in parts)


def read(root: Path, environ: Mapping[str, str]) -> Contract:
    """Read and check everything that the service has written.

    Args:
        root: `/opt/ml`, or where it is moved to.
        environ: For SM_MASTER_ADDR, the address of rank 0's host where host names mean nothing (one machine).

    Raises:
        SageMakerError: a file is missing or damaged, or a channel is not there or has a mode that cannot be read.
    """
    config = root / "input" / "config"
    checkpoint_config = _object(config / "checkpointconfig.json", missing={})
    local_path = checkpoint_config.get("LocalPath") or "/opt/ml/checkpoints"
    return Contract(
        root=root,
        hyperparameters=_object(config / "hyperparameters.json", missing={}),
        channels=_channels(root, _object(config / "inputdataconfig.json", missing={})),
        cluster=_cluster(config / "resourceconfig.json", environ),
        checkpoints=_below(root, str(local_path)),
        checkpoints_kept=bool(checkpoint_config),
    )


def _below(root: Path, path: str) -> Path:
    """A path as the service names it; what it puts below /opt/ml lies below the root."""
    given = Path(path)
    return root / given.relative_to(ROOT) if given.is_relative_to(ROOT) else given


def _object(path: Path, *, missing: dict[str, Any] | None = None) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        if missing is not None:
            return missing
        raise SageMakerError(
            f"{path} is missing; start this command as a SageMaker training container does, or give --root the folder "
            "that stands for /opt/ml"
        ) from None
    except OSError as exc:
        raise SageMakerError(f"{path} cannot be read: {exc.strerror}") from exc
    except ValueError as exc:
        raise SageMakerError(f"{path} is not valid JSON: {exc}") from exc
    if not isinstance(found, dict):
        raise SageMakerError(f"{path} holds {type(found).__name__}, not an object")
    return found


def _cluster(path: Path, environ: Mapping[str, str]) -> Cluster:
    found = _object(path)
    hosts, current = found.get("hosts"), found.get("current_host")
    if not isinstance(hosts, list) or not all(isinstance(host, str) and host for host in hosts):
        raise SageMakerError(f"{path}: hosts = {hosts!r} is not a list of names")
    if not isinstance(current, str) or len(set(hosts)) != len(hosts) or current not in hosts:
        raise SageMakerError(f"{path}: current_host = {current!r} must stand exactly once in hosts = {hosts!r}")
    return Cluster(
        current_host=current,
        hosts=tuple(sorted(hosts, key=natural_order)),
        interface=str(found.get("network_interface_name") or ""),
        instance_type=str(found.get("current_instance_type") or ""),
        master=environ.get("SM_MASTER_ADDR", ""),
    )


def _channels(root: Path, config: Mapping[str, Any]) -> dict[str, Path]:
    channels: dict[str, Path] = {}
    for name, options in config.items():
        mode = options.get("TrainingInputMode", "File") if isinstance(options, dict) else "File"
        if mode == "Pipe":
            raise SageMakerError(
                f"channel {name} has the input mode Pipe, which cannot be read twice or in another order; "
                "make the job with the input mode File or FastFile"
            )
        folder = root / "input" / "data" / name
        if not folder.is_dir():
            raise SageMakerError(f"channel {name} is in inputdataconfig.json, but {folder} is not there")
        channels[name] = folder
    return channels
