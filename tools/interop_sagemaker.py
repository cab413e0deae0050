"""Comparison of our reading of SageMaker's container files with sagemaker-training-toolkit.

Run as `python tools/interop_sagemaker.py`. Both read the same /opt/ml, the toolkit in an environment of its own made by
uv (its pins conflict with ours, 250 MB). SM_* variables set by both must be equal, except `EXPECTED_DIFFERENCES`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from lt_launch.sagemaker.contract import read_contract
from lt_launch.sagemaker.toolkit import toolkit_environment

TOOLKIT_REQUIREMENTS = ("sagemaker-training==5.1.1", "setuptools<81")
EXPECTED_DIFFERENCES = {
    "SM_HOSTS": "the toolkit keeps the string order of the service, lt sorts by number",
    "SM_NUM_CPUS": "lt counts the cores that the process may use, the toolkit all cores of the machine",
}
TOOLKIT_SCRIPT = """
import json, os, sys
os.environ["SAGEMAKER_BASE_DIR"] = sys.argv[1]
from sagemaker_training import environment
print(json.dumps(environment.Environment().to_env_vars()))
"""
HYPERPARAMETERS = {
    "LEARNING_RATE": "1e-3",
    "MAX_STEPS": "100",
    "TOKENIZER": '"org/name"',
    "BETA1": "0.9",
    "PLAIN": "true",
    "LIST": "[1, 2]",
    "TEXT": "a b",
}


def create_opt_ml(root: Path) -> None:
    """Create the /opt/ml of a job with twelve hosts and two channels."""
    config = root / "input" / "config"
    config.mkdir(parents=True)
    for channel in ("train", "tokenizer"):
        (root / "input" / "data" / channel).mkdir(parents=True)
    (root / "model").mkdir()
    (root / "output").mkdir()
    hosts = sorted(f"algo-{number}" for number in range(1, 13))
    resources = {
        "current_host": "algo-10",
        "hosts": hosts,
        "network_interface_name": "eth0",
        "current_instance_type": "ml.p5.48xlarge",
        "current_group_name": "homogeneousCluster",
        "instance_groups": [
            {"instance_group_name": "homogeneousCluster", "instance_type": "ml.p5.48xlarge", "hosts": hosts}
        ],
    }
    channel = {"TrainingInputMode": "File", "S3DistributionType": "FullyReplicated", "RecordWrapperType": "None"}
    (config / "resourceconfig.json").write_text(json.dumps(resources))
    (config / "hyperparameters.json").write_text(json.dumps(HYPERPARAMETERS))
    (config / "inputdataconfig.json").write_text(json.dumps({"train": channel, "tokenizer": channel}))


def main() -> int:
    """Compare; return 0 if all common variables are equal, 3 if the toolkit could not be installed."""
    with tempfile.TemporaryDirectory(prefix="lt-peers-") as folder:
        root = Path(folder) / "ml"
        create_opt_ml(root)
        words = [word for package in TOOLKIT_REQUIREMENTS for word in ("--with", package)]
        command = ["uv", "run", "--no-project", "--python", "3.11", *words, "python", "-c", TOOLKIT_SCRIPT, str(root)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            print(done.stderr[-2000:])
            return 3
        theirs = json.loads(done.stdout.splitlines()[-1])
        ours = toolkit_environment(read_contract(root, os.environ), devices=0)
    same, different = [], []
    for name in sorted(ours.keys() & theirs.keys()):
        equal = ours[name] == theirs[name] or _parse_json(ours[name]) == _parse_json(theirs[name])
        (same if equal or name in EXPECTED_DIFFERENCES else different).append(name)
        if not equal:
            print(
                f"{name}: ours {ours[name]!r}, theirs {theirs[name]!r}"
                + (f" ({EXPECTED_DIFFERENCES[name]})" if name in EXPECTED_DIFFERENCES else "")
            )
    only = sorted(ours.keys() - theirs.keys())
    print(f"{len(same)} variables agree: {', '.join(same)}")
    print(f"only ours: {', '.join(only) or 'none'}")
    return 1 if different or only else 0


def _parse_json(value: str) -> object:
    try:
        return json.loads(value)
    except (TypeError, ValueError):
        return value


if __name__ == "__main__":
    sys.exit(main())
