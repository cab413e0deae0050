"""Folders of this machine that stand for addresses: of channels, checkpoints and results."""

import json
from pathlib import Path
from typing import Any

import pytest

from lt_launch.job import Job, Pipeline
from lt_launch.profile import Profile
from lt_launch.sagemaker.addresses import address_of, channel_address, local_folder
from lt_launch.sagemaker.errors import SageMakerError
from lt_launch.sagemaker.local import ADDRESSES_FILE, SageMakerLocalTarget
from lt_launch.sagemaker.target import REQUEST_FILE, to_stage_status
from lt_trainer.config.recipe import load, to_toml

FSX = "fs-0123456789abcdef0"


def rendered(nodes: int = 1, **options: Any) -> tuple[dict[str, Any], dict[str, str]]:
    recipe = to_toml(load(base={"data": {"store": "/data/store"}}).recipe)
    job = Job(name="a-job", argv=("python",), recipe=recipe, nodes=nodes)
    profile = Profile().with_values({f"sagemaker.{name}": value for name, value in options.items()}, "test")
    files = SageMakerLocalTarget().render(Pipeline.from_job(job), profile).files
    return json.loads(files[REQUEST_FILE]), json.loads(files[ADDRESSES_FILE])


def test_the_longest_address_decides_and_a_name_is_no_folder() -> None:
    folders = {"s3://b": "/all", "s3://b/runs/": "/runs"}
    assert local_folder("s3://b/runs/one", folders) == "/runs/one"
    assert local_folder("s3://b/runs", folders) == "/runs"
    assert local_folder("s3://b/runs2", folders) == "/all/runs2"
    assert local_folder("s3://b2/runs", folders) == ""


def test_every_address_of_the_request_has_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    request, folders = rendered(
        channels=["train=s3://bucket/store", f"tokenizer=fsx://{FSX}/abcdefgh/tokenizer?ro", "init=/models/llama"],
        output_path="s3://bucket/models",
        checkpoint_s3_uri="s3://kept/checkpoints",
        local_folders=["s3://bucket=bucket", f"fsx://{FSX}/abcdefgh=/fsx"],
        subnets=["subnet-0a1b2c3d"],
        security_groups=["sg-0a1b2c3d"],
    )
    assert folders == {
        "s3://bucket/store": str(tmp_path / "bucket" / "store"),
        f"fsx://{FSX}/abcdefgh/tokenizer": "/fsx/tokenizer",
        "s3://local/models/llama": "/models/llama",
        "s3://kept/checkpoints": "checkpoints",
        "s3://bucket/models": str(tmp_path / "bucket" / "models"),
    }
    sources = {address_of(channel["DataSource"]) for channel in request["InputDataConfig"]}
    assert sources < set(folders)


def test_without_folders_results_stay_with_the_job() -> None:
    _, folders = rendered(nodes=2)
    assert folders == {
        "s3://local/data/store": "/data/store",
        "s3://local/run": "run",
        "s3://local/checkpoints": "checkpoints",
    }


def test_a_channel_that_no_folder_stands_for_is_refused() -> None:
    with pytest.raises(SageMakerError, match=r'train=s3://bucket/store: no folder .* add "s3://bucket/store=/PATH" to'):
        rendered(channels=["train=s3://bucket/store"], local_folders=["s3://bucket/other=/data"])


def test_the_root_of_a_file_system_is_one_address() -> None:
    system = {"FileSystemId": FSX, "FileSystemType": "EFS", "DirectoryPath": "/", "FileSystemAccessMode": "rw"}
    assert channel_address(f"efs://{FSX}?rw") == address_of({"FileSystemDataSource": system}) == f"efs://{FSX}/"


GOOD_DESCRIPTION: dict[str, Any] = {
    "TrainingJobName": "a-job",
    "TrainingJobStatus": "InProgress",
    "SecondaryStatus": "Training",
    "SecondaryStatusTransitions": [{"Status": "Training", "StartTime": 5.0, "StatusMessage": "in progress"}],
    "FinalMetricDataList": [{"MetricName": "loss", "Value": "2.5"}],
    "ResourceConfig": {"InstanceCount": 2},
    "FailureReason": None,
    "CreationTime": 1.0,
}


def test_a_description_is_a_status() -> None:
    status = to_stage_status("x", GOOD_DESCRIPTION)
    assert (status.state, status.job_id, status.nodes, status.since) == ("running", "a-job", ("algo-1", "algo-2"), 5.0)
    assert status.reason == "Training, in progress, loss=2.5"


@pytest.mark.parametrize("name", [*GOOD_DESCRIPTION, "everything"])
def test_a_strange_description_is_a_status_too(name: str) -> None:
    """That of `sagemaker-local` is a file of the launch, which somebody else may have made."""
    strange: list[Any] = [
        None,
        True,
        "abc",
        [],
        {},
        [1],
        [{}],
        [{"StartTime": "abc"}],
        {"a": 1},
        -1,
        10**30,
        float("nan"),
    ]
    strange += [{"InstanceCount": value} for value in ("abc", 10**9, -5, None, True)]
    for value in strange:
        changed = dict.fromkeys(GOOD_DESCRIPTION, value) if name == "everything" else {**GOOD_DESCRIPTION, name: value}
        status = to_stage_status("x", changed)
        assert status.state in ("running", "unknown")
        assert len(status.nodes) <= 2
        assert status.since >= 0
    without = {key: value for key, value in GOOD_DESCRIPTION.items() if key != name}
    assert to_stage_status("x", {} if name == "everything" else without).stage == "x"
