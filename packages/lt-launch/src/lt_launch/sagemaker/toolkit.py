"""SM_* variables of SageMaker's own containers, for code in the image that expects them.

The service sets none of them: sagemaker-training-toolkit computes them from the files of the contract, as does this
module. A value is text, or JSON as the toolkit writes it: keys sorted, no blanks. A slow test compares every variable
with the toolkit's own.
"""

import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lt_launch.sagemaker.contract import Contract
from lt_launch.sagemaker.instances import INSTANCE_TYPES

__all__ = ["count_gpus", "toolkit_environment"]

SDK_PREFIX = "sagemaker_"
"""Start of the hyperparameters that the SDK adds for the toolkit; no variable SM_HP_* is made of them."""
SDK_HYPERPARAMETERS = (
    "sagemaker_program",
    "sagemaker_submit_directory",
    "sagemaker_enable_cloudwatch_metrics",
    "sagemaker_region",
    "sagemaker_container_log_level",
    "sagemaker_job_name",
    "default_user_module_name",
    "_tuning_objective_metric",
    "sagemaker_s3_output",
)
"""Those of them that the toolkit reads itself; the others are SM_FRAMEWORK_PARAMS."""
DISTRIBUTIONS = (
    "mpi",
    "parameter_server",
    "distributed_dataparallel",
    "pytorch_ddp",
    "pytorch_xla_multi_worker",
    "multi_worker_mirrored_strategy",
    "torch_distributed",
)
"""Ways of the SDK to start several processes; each is switched on by sagemaker_NAME_enabled."""
DEFAULT_GROUP = "homogeneousCluster"
DEFAULT_INTERFACE = "eth0"


def toolkit_environment(contract: Contract, environ: Mapping[str, str], devices: Path = Path("/dev")) -> dict[str, str]:
    """Return the SM_* variables by name.

    Args:
        contract: inputs placed by the service.
        environ: environment of the container.
        devices: folder of the device files.
    """
    values = _described(contract, environ, devices)
    hyperparameters = values["hyperparameters"]
    named = {f"SM_{name.upper()}": values[name] for name in _VARIABLES}
    named |= {
        "SM_HPS": hyperparameters,
        "SM_FRAMEWORK_PARAMS": values["additional_framework_parameters"],
        "SM_CHANNELS": sorted(contract.channels),
        "SM_TRAINING_ENV": values,
        "SM_USER_ARGS": _command_line(hyperparameters),
    }
    if values["topology"]:
        named["SM_TOPOLOGY"] = values["topology"]
    named |= {f"SM_CHANNEL_{name.upper()}": path for name, path in values["channel_input_dirs"].items()}
    named |= {f"SM_HP_{name.upper()}": value for name, value in hyperparameters.items()}
    return {name: _format(value) for name, value in named.items()}


_VARIABLES = (
    "hosts",
    "network_interface_name",
    "user_entry_point",
    "resource_config",
    "input_data_config",
    "output_data_dir",
    "current_host",
    "current_instance_type",
    "current_instance_group",
    "current_instance_group_hosts",
    "instance_groups",
    "instance_groups_dict",
    "distribution_instance_groups",
    "is_hetero",
    "module_name",
    "log_level",
    "framework_module",
    "input_dir",
    "input_config_dir",
    "output_dir",
    "num_cpus",
    "num_gpus",
    "num_neurons",
    "model_dir",
    "module_dir",
    "output_intermediate_dir",
)
"""Parts of the description that have a variable of their own."""


def count_gpus(devices: Path = Path("/dev")) -> int:
    """Return the number of GPUs whose device files this container has."""
    return len([path for path in devices.glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()])


def _described(contract: Contract, environ: Mapping[str, str], devices: Path) -> dict[str, Any]:
    """Return everything that the toolkit knows of the container, the content of SM_TRAINING_ENV."""
    resources = contract.resource_config
    given = {name: _parse_json(value) for name, value in contract.hyperparameters.items()}
    of_sdk = {
        name: value for name, value in given.items() if name.startswith(SDK_PREFIX) or name in SDK_HYPERPARAMETERS
    }
    framework = {name: value for name, value in of_sdk.items() if name not in SDK_HYPERPARAMETERS}
    hosts, current_host = list(resources["hosts"]), contract.cluster.current_host
    groups = {group["instance_group_name"]: group for group in resources.get("instance_groups") or ()}
    group_name = resources.get("current_group_name", DEFAULT_GROUP)
    spread = _distribution_groups(framework, group_name)
    spread_hosts = [host for name in groups if name in spread for host in groups[name]["hosts"]] if groups else hosts
    master = (spread_hosts or hosts)[0]
    program = environ.get("SAGEMAKER_PROGRAM") or of_sdk.get("sagemaker_program")
    known = INSTANCE_TYPES.get(contract.cluster.instance_type)
    root, output = contract.root, contract.root / "output"
    return {
        "additional_framework_parameters": framework,
        "channel_input_dirs": {name: str(path) for name, path in contract.channels.items()},
        "current_host": current_host,
        "current_instance_group": group_name,
        "current_instance_group_hosts": groups.get(group_name, {}).get("hosts", []),
        "current_instance_type": resources.get("current_instance_type", "local"),
        "distribution_hosts": spread_hosts,
        "distribution_instance_groups": spread,
        "framework_module": environ.get("SAGEMAKER_TRAINING_MODULE"),
        "hosts": hosts,
        "hyperparameters": {name: value for name, value in given.items() if name not in of_sdk},
        "input_config_dir": str(root / "input" / "config"),
        "input_data_config": contract.input_data_config,
        "input_dir": str(root / "input"),
        "instance_groups": list(groups),
        "instance_groups_dict": groups,
        "is_hetero": len(groups) > 1,
        "is_master": current_host == master,
        "is_modelparallel_enabled": None,
        "is_smddpmprun_installed": shutil.which("smddpmprun") is not None,
        "is_smddprun_installed": shutil.which("smddprun") is not None,
        "job_name": environ.get("TRAINING_JOB_NAME"),
        "log_level": of_sdk.get("sagemaker_container_log_level", logging.INFO),
        "master_hostname": master,
        "model_dir": str(contract.model_dir),
        "module_dir": str(of_sdk.get("sagemaker_submit_directory", root / "code")),
        "module_name": str(program).removesuffix(".py"),  # "None" without a program, as there
        "network_interface_name": resources.get("network_interface_name", DEFAULT_INTERFACE),
        "num_cpus": os.cpu_count() or 1,
        "num_gpus": count_gpus(devices),
        "num_neurons": known.devices if known and known.engine == "neuron" else 0,
        "output_data_dir": str(contract.output_data_dir),
        "output_dir": str(output),
        "output_intermediate_dir": str(output / "intermediate"),
        "resource_config": resources,
        "topology": resources.get("topology", []),
        "user_entry_point": program,
    }


def _distribution_groups(framework: Mapping[str, Any], group: str) -> list[Any]:
    """Return the instance groups that the SDK spreads one program over."""
    given = framework.get("sagemaker_distribution_instance_groups")
    if given is not None:
        return given
    return [group] if any(framework.get(f"sagemaker_{name}_enabled") for name in DISTRIBUTIONS) else []


def _command_line(hyperparameters: Mapping[str, Any]) -> list[str]:
    """Return the hyperparameters as options of a program."""
    words: list[str] = []
    for name, value in sorted(hyperparameters.items()):
        text = ",".join(f"{key}={item}" for key, item in sorted(value.items())) if isinstance(value, dict) else value
        words += [f"--{name}" if len(name) > 1 else f"-{name}", "" if text is None else str(text)]
    return words


def _format(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, separators=(",", ":"))


def _parse_json(value: Any) -> Any:
    """Parse a hyperparameter as the toolkit does: as JSON if valid, else as text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
