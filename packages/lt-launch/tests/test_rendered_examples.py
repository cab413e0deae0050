"""The examples for SageMaker, Slurm and Kubernetes render to the files in data/rendered, byte for byte."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lt_launch.launcher import format_rendered
from lt_launch.profile import Profile
from lt_launch.run_file import RunOverrides, read_run_file
from lt_launch.target import get_target

ROOT = Path(__file__).parents[3]
EXAMPLES, RENDERED = ROOT / "examples" / "launch", Path(__file__).parent / "data" / "rendered"
CASES = {
    "litespark.json": ("litespark-sagemaker.toml", "sagemaker"),
    "continued.sbatch": ("continued.toml", "slurm"),
    "smp-enroot.sbatch": ("smp-enroot.toml", "slurm"),
    "smp.yaml": ("smp-enroot.toml", "k8s"),
}


def text_of(name: str) -> str:
    example, on = CASES[name]
    file = read_run_file(EXAMPLES / example, Profile(), RunOverrides())
    text = format_rendered(get_target(on).render(file.pipeline, file.profile))
    text = text.replace(str(ROOT), "/repository")
    return re.sub(r"(  run\.toml: \|\n).*?(?=^---$)", r"\1    # the recipe\n", text, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("name", CASES)
def test_examples_render_as_they_did(name: str) -> None:
    text, golden = text_of(name), RENDERED / name
    if os.environ.get("LT_WRITE_GOLDEN"):
        golden.parent.mkdir(parents=True, exist_ok=True)
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")


@pytest.mark.parametrize("example", ["continued.toml", "smp-enroot.toml"])
def test_every_script_is_clean_and_has_at_most_forty_lines(example: str) -> None:
    file = read_run_file(EXAMPLES / example, Profile(), RunOverrides())
    for text in get_target("slurm").render(file.pipeline, file.profile).files.values():
        assert len(text.splitlines()) <= 40
        done = subprocess.run(
            [Path(sys.executable).with_name("shellcheck"), "-"], input=text, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout
