"""SM_* variables of SageMaker's own containers, for code in the image that expects them.

The service sets none of them: sagemaker-training-toolkit computes them from the files of the contract, as does this
module. Values are text or JSON, as in the toolkit.
"""

import json
import os
from typing import Any

from lt_launch.sagemaker.contract import Contract

__all__ = ["toolkit_environment"]


def toolkit_environment(contract: Contract, *, devices: int) -> dict[str, str]:
    """Return the SM_* variables by name.

    Args:
        contract: inputs placed by the service.
        devices: number of GPUs of this host.
    """
    cluster = contract.cluster
    values: dict[str, Any] = {
        "SM_MODEL_DIR": str(contract.model_dir),
        "SM_OUTPUT_DATA_DIR": str(contract.output_data_dir),
        "SM_OUTPUT_DIR": str(contract.root / "output"),
        "SM_INPUT_DIR": str(contract.root / "input"),
        "SM_INPUT_CONFIG_DIR": str(contract.root / "input" / "config"),
        "SM_CHANNELS": sorted(contract.channels),
        "SM_HPS": {name: _parse_json(value) for name, value in contract.hyperparameters.items()},
        "SM_HOSTS": list(cluster.hosts),
        "SM_CURRENT_HOST": cluster.current_host,
        "SM_NETWORK_INTERFACE_NAME": cluster.network_interface,
        "SM_CURRENT_INSTANCE_TYPE": cluster.instance_type,
        "SM_NUM_GPUS": devices,
        "SM_NUM_CPUS": os.cpu_count() or 1,
    }
    values |= {f"SM_CHANNEL_{name.upper()}": str(path) for name, path in contract.channels.items()}
    values |= {f"SM_HP_{name.upper()}": _parse_json(value) for name, value in contract.hyperparameters.items()}
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}


def _parse_json(value: Any) -> Any:
    """Parse a hyperparameter as the toolkit does: as JSON if valid, else as text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
