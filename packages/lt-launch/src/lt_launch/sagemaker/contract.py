"""Folder contract between SageMaker and a training container, read completely before training starts.

    /opt/ml/input/config/hyperparameters.json    one map of strings; every value is a string
    /opt/ml/input/config/resourceconfig.json     current_host, hosts, network_interface_name
    /opt/ml/input/config/inputdataconfig.json    the channels and their modes
    /opt/ml/input/config/checkpointconfig.json   {"LocalPath": ...} when the job has checkpoints
    /opt/ml/input/data/CHANNEL                   data of a channel
    /opt/ml/checkpoints                          restored at each start, uploaded to S3 continuously
    /opt/ml/model                                uploaded to S3 at the end
    /opt/ml/output/failure                       its first 1024 characters become FailureReason

The service sorts hosts as strings (algo-10 before algo-2); `Cluster.hosts` is sorted numerically, so that adjacent
ranks have adjacent names. All paths are below one root, which tests and the emulator can relocate.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lt_launch.sagemaker.errors import SageMakerError

ROOT = Path("/opt/ml")
GRACE_PERIOD_S = 115.0
"""Grace period from SIGTERM to SIGKILL; the service kills everything after 120 s, and the failure must be written
before."""
RUN_CHANNEL = "run"
"""Channel with a writable file system: the run directory that all hosts share."""
PROCS_PER_NODE_VARIABLE = "LT_PROCS_PER_NODE"
DIGITS = re.compile(r"(\d+)")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Hosts of a job, starting with that of rank 0."""

    current_host: str
    hosts: tuple[str, ...]
    network_interface: str = ""
    """Network interface that connects the hosts; empty if unknown."""
    instance_type: str = ""
    master_addr_override: str = ""
    """Address of the first host if its name does not resolve; empty = its name."""

    @property
    def node_rank(self) -> int:
        """Index of this host among the hosts."""
        return self.hosts.index(self.current_host)

    @property
    def master_addr(self) -> str:
        """Address of rank 0; the loopback address for a single host."""
        return self.master_addr_override or (self.hosts[0] if len(self.hosts) > 1 else "127.0.0.1")


@dataclass(frozen=True, kw_only=True)
class Contract:
    """Inputs that the service has placed below the root, and the paths of the results."""

    root: Path
    hyperparameters: Mapping[str, Any]
    channels: Mapping[str, Path]
    """Folder by channel name."""
    cluster: Cluster
    checkpoint_dir: Path
    has_checkpoint_config: bool
    """True if the service uploads the checkpoint folder to S3 and restores it."""
    resource_config: Mapping[str, Any]
    """resourceconfig.json as the service wrote it, hosts in its order."""
    input_data_config: Mapping[str, Any]
    """inputdataconfig.json as the service wrote it."""

    @property
    def model_dir(self) -> Path:
        """Folder of the trained model."""
        return self.root / "model"

    @property
    def failure_file(self) -> Path:
        """File whose first 1024 characters become FailureReason."""
        return self.root / "output" / "failure"

    @property
    def output_data_dir(self) -> Path:
        """Folder of other output."""
        return self.root / "output" / "data"


def engine_of(instance_type: str) -> str:
    """Return the engine that trains on an instance type."""
    return "neuron" if instance_type.startswith("ml.trn") else "gpu"


def natural_sort_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key that compares digits as numbers: algo-2 before algo-10."""
    parts = DIGITS.split(name)
    return tuple((1, int(part), part) if part.isdigit() else (0, 0, part) for part in parts)


def read_contract(root: Path, environ: Mapping[str, str]) -> Contract:
    """Read and check all inputs that the service has written.

    Args:
        root: `/opt/ml`, or its replacement.
        environ: for SM_MASTER_ADDR, the address of rank 0's host where host names do not resolve (one machine).

    Raises:
        SageMakerError: a file is missing or damaged, or a channel is missing or has an unsupported mode.
    """
    config = root / "input" / "config"
    hyperparameters = _read_json_object(config / "hyperparameters.json", default={})
    checkpoint_config = _read_json_object(config / "checkpointconfig.json", default={})
    local_path = checkpoint_config.get("LocalPath") or "/opt/ml/checkpoints"
    input_data_config = _read_json_object(config / "inputdataconfig.json", default={})
    resource_config = _read_json_object(config / "resourceconfig.json")
    return Contract(
        root=root,
        hyperparameters=hyperparameters,
        channels=_read_channels(root, input_data_config),
        cluster=_read_cluster(config / "resourceconfig.json", resource_config, environ),
        checkpoint_dir=resolve_path(root, str(local_path)),
        has_checkpoint_config=bool(checkpoint_config),
        resource_config=resource_config,
        input_data_config=input_data_config,
    )


def resolve_path(root: Path, path: str) -> Path:
    """Return a path of the service with /opt/ml replaced by the root."""
    given = Path(path)
    return root / given.relative_to(ROOT) if given.is_relative_to(ROOT) else given


def _read_json_object(path: Path, *, default: dict[str, Any] | None = None) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        if default is not None:
            return default
        remedy = "run this in a SageMaker training container, or set --root to the folder used as /opt/ml"
        raise SageMakerError(f"{path} is missing; {remedy}") from None
    except ValueError as exc:
        raise SageMakerError(f"{path} is not valid JSON: {exc}") from exc
    if not isinstance(content, dict):
        raise SageMakerError(f"{path} is {type(content).__name__}, not an object")
    return content


def _read_cluster(path: Path, resources: Mapping[str, Any], environ: Mapping[str, str]) -> Cluster:
    hosts, current = resources.get("hosts"), resources.get("current_host")
    if not isinstance(hosts, list) or not all(isinstance(host, str) and host for host in hosts):
        raise SageMakerError(f"{path}: hosts = {hosts!r} is not a list of names")
    if not isinstance(current, str) or len(set(hosts)) != len(hosts) or current not in hosts:
        raise SageMakerError(f"{path}: current_host = {current!r} must be exactly once in hosts = {hosts!r}")
    return Cluster(
        current_host=current,
        hosts=tuple(sorted(hosts, key=natural_sort_key)),
        network_interface=str(resources.get("network_interface_name") or ""),
        instance_type=str(resources.get("current_instance_type") or ""),
        master_addr_override=environ.get("SM_MASTER_ADDR", ""),
    )


def _read_channels(root: Path, config: Mapping[str, Any]) -> dict[str, Path]:
    channels: dict[str, Path] = {}
    for name, options in config.items():
        mode = options.get("TrainingInputMode", "File") if isinstance(options, dict) else "File"
        if mode == "Pipe":
            raise SageMakerError(
                f"channel {name} has the input mode Pipe, which cannot be read twice or in another order; "
                "use the input mode File or FastFile"
            )
        folder = root / "input" / "data" / name
        if not folder.is_dir():
            raise SageMakerError(f"channel {name} is in inputdataconfig.json, but {folder} does not exist")
        channels[name] = folder
    return channels
