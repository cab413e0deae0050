"""Our reading of SageMaker's container files beside that of sagemaker-training-toolkit: `python tools/peers_launch.py`.

The same /opt/ml is read by both, the toolkit in an environment of its own from uv (its pins exclude ours, 250 MB). What
both say must be equal: SM_* variables by name, but for those in `MEANT`, where we differ and say why.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from lt_launch.sagemaker.contract import read
from lt_launch.sagemaker.toolkit import toolkit_environment

TOOLKIT = ("sagemaker-training==5.1.1", "setuptools<81")
MEANT = {
    "SM_HOSTS": "the toolkit keeps the service's order of strings, we order by number",
    "SM_NUM_CPUS": "cores that the process may use, or all of the machine",
}
PROGRAM = """
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


def lay_out(root: Path) -> None:
    """An /opt/ml of a job with twelve hosts and two channels."""
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
    """Compare; 0 when all that both say is equal, 3 when the toolkit could not be installed."""
    with tempfile.TemporaryDirectory(prefix="lt-peers-") as folder:
        root = Path(folder) / "ml"
        lay_out(root)
        words = [word for package in TOOLKIT for word in ("--with", package)]
        command = ["uv", "run", "--no-project", "--python", "3.11", *words, "python", "-c", PROGRAM, str(root)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            print(done.stderr[-2000:])
            return 3
        theirs = json.loads(done.stdout.splitlines()[-1])
        ours = toolkit_environment(read(root, os.environ), devices=0)
    same, different = [], []
    for name in sorted(ours.keys() & theirs.keys()):
        equal = ours[name] == theirs[name] or _parsed(ours[name]) == _parsed(theirs[name])
        (same if equal or name in MEANT else different).append(name)
        if not equal:
            print(
                f"{name}: ours {ours[name]!r}, theirs {theirs[name]!r}" + (f" ({MEANT[name]})" if name in MEANT else "")
            )
    only = sorted(ours.keys() - theirs.keys())
    print(f"{len(same)} variables agree: {', '.join(same)}")
    print(f"only ours: {', '.join(only) or 'none'}")
    return 1 if different or only else 0


def _parsed(value: str) -> object:
    try:
        return json.loads(value)
    except (TypeError, ValueError):
        return value


if __name__ == "__main__":
    sys.exit(main())
