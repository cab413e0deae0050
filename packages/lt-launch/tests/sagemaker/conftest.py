"""Golden files of this folder, a store, and jobs submitted to a service of this machine."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lt_launch.launch_dir import load_launch
from lt_launch.launcher import launch
from lt_launch.profile import Profile
from lt_launch.run_file import RunOverrides, read_run_file
from lt_launch.target import Launch
from lt_test_helpers.stores import make_stores

DATA = Path(__file__).parent / "data"
JOB = """
[job]
name = "train"
recipe = "recipe.toml"
nodes = {nodes}
env = {{ OMP_NUM_THREADS = "1" }}
resources = {{ instance_type = "ml.p5.48xlarge" }}
[profile.sagemaker]
region = "us-east-1"
endpoint_url = "{url}"
role = "arn:aws:iam::123456789012:role/trainer"
image = "123456789012.dkr.ecr.us-east-1.amazonaws.com/lt:1"
channels = [{channels}]
output_path = "s3://data/out"
checkpoint_s3_uri = "s3://data/checkpoints"
subnets = ["subnet-0a1b2c3d"]
security_groups = ["sg-0a1b2c3d"]
"""


@pytest.fixture
def golden() -> Callable[[str, str], None]:
    """Compares text with a file of `data/`; LT_WRITE_GOLDEN=1 writes it, to be looked at before it is committed."""

    def compare(name: str, text: str) -> None:
        path = DATA / name
        if os.environ.get("LT_WRITE_GOLDEN"):
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8")

    return compare


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer and a small packed token store."""
    root = tmp_path_factory.mktemp("data")
    make_stores(root, {"store": 60})
    return root


@pytest.fixture
def submit(tmp_path: Path, tiny_recipe: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Launch]:
    """Submit a training job in `tmp_path` to the service at an address, with credentials that no service knows."""
    nowhere = dict.fromkeys(("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"), os.devnull)
    keys = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "testing")
    for name, value in {**nowhere, **keys, "NO_PROXY": "127.0.0.1", "LT_LAUNCH_HOME": str(tmp_path / "home")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)

    def go(url: str, *, nodes: int = 1, steps: int = 1000, **channels: str) -> Launch:
        Path("recipe.toml").write_text(tiny_recipe({"data.store": "store", "schedule.max_steps": steps}))
        given = ", ".join(f'"{name}={address}"' for name, address in {"train": "s3://data/store", **channels}.items())
        Path("job.toml").write_text(JOB.format(nodes=nodes, url=url, channels=given))
        file = read_run_file("job.toml", Profile(), RunOverrides())
        assert launch(file.pipeline, file.profile, "sagemaker") == 0
        return load_launch(tmp_path / file.pipeline.out)

    return go
