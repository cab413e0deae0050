"""Manifests against Kubeflow's own models, which have JobSet's and Kubernetes' inside."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

DATA = Path(__file__).parent / "data"
PACKAGES = (["--no-deps", "kubeflow-trainer-api==2.3.0"], ["pydantic>=2.11"])
READ = """
import json, sys
from kubeflow_trainer_api import models
kind, documents = json.load(sys.stdin)
print(json.dumps([getattr(models, kind).from_dict(document).to_dict() for document in documents]))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the models."""
    if shutil.which("uv") is None:
        pytest.skip("uv, which makes environments, is not installed")
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run(["uv", "venv", "-q", "--python", sys.executable, folder], check=True)
    for words in PACKAGES:
        command = ["uv", "pip", "install", "-q", "--python", folder / "bin" / "python", *words]
        installed = subprocess.run(command, capture_output=True, text=True, check=False)
        if installed.returncode:
            pytest.skip(f"{', '.join(words)} cannot be installed here: {installed.stderr[-300:]}")
    return folder / "bin" / "python"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "model"), [("trainjob", "TrainerV1alpha1TrainJob"), ("jobset", "JobsetV1alpha2JobSet")]
)
def test_the_models_read_every_field(python: Path, kind: str, model: str) -> None:
    """They drop what a version does not have, as the API server does, also deep in a pod."""
    text = (DATA / f"{kind}.yaml").read_text()
    wrong = re.sub(r"( *)mountPath: /dev/shm", r"\g<0>\n\1noSuchField: 1", text)
    (_, made), (_, with_a_wrong_field) = yaml.safe_load_all(text), yaml.safe_load_all(wrong)
    assert made != with_a_wrong_field
    asked = json.dumps([model, [made, with_a_wrong_field]])
    done = subprocess.run([python, "-c", READ], input=asked, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == [made, made]
