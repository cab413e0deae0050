"""The examples render to the files in data/rendered, byte for byte, without loading anything heavy.

The files are written anew with LT_WRITE_GOLDEN=1.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lt_launch.__main__ import main
from lt_launch.hosts import SshTarget
from lt_launch.launcher import format_rendered
from lt_launch.node import Host
from lt_launch.profile import Profile
from lt_launch.run_file import RunOverrides, read_run_file
from lt_launch.target import get_target

ROOT = Path(__file__).parents[3]
EXAMPLES, RENDERED = ROOT / "examples" / "launch", Path(__file__).parent / "data" / "rendered"
CASES = {
    "tiny.local": ("tiny.toml", "local"),
    "hosts.ssh": ("hosts.toml", "ssh"),
    "litespark.json": ("litespark-sagemaker.toml", "sagemaker"),
    "continued.sbatch": ("continued.toml", "slurm"),
    "smp-enroot.sbatch": ("smp-enroot.toml", "slurm"),
    "smp.yaml": ("smp-enroot.toml", "k8s"),
}
HEAVY = ("torch", "numpy", "boto3", "botocore", "yaml", "rich", "transformers", "lt_data")


@pytest.fixture(autouse=True)
def in_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Specs have the working folder of the command."""
    monkeypatch.chdir(ROOT)


def text_of(name: str) -> str:
    """The text without recipes, and without their hashes."""
    example, on = CASES[name]
    file = read_run_file(EXAMPLES / example, Profile().with_values({"python": "python3"}, ""), RunOverrides())
    rendered = get_target(on).render(file.pipeline, file.profile)
    files = {name: text for name, text in rendered.files.items() if not name.endswith("recipe.toml")}
    text = format_rendered(replace(rendered, files=files)).replace(str(ROOT), "/repository")
    text = re.sub(r'"recipe": "[0-9a-f]{64}"', '"recipe": "HASH"', text)
    return re.sub(r"(  run\.toml: \|\n).*?(?=^---$)", r"\1    # the recipe\n", text, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("name", CASES)
def test_examples_render_as_they_did(name: str) -> None:
    text, golden = text_of(name), RENDERED / name
    if os.environ.get("LT_WRITE_GOLDEN"):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")


def test_what_is_shown_of_a_host_is_one_word_for_its_shell() -> None:
    assert SshTarget().shown(Host(name="a"), ["lt", "a b"]) == ("bash", "lt 'a b'")


@pytest.mark.parametrize("example", ["continued.toml", "smp-enroot.toml"])
def test_every_script_is_clean_and_has_at_most_forty_lines(example: str) -> None:
    file = read_run_file(EXAMPLES / example, Profile(), RunOverrides())
    for text in get_target("slurm").render(file.pipeline, file.profile).files.values():
        assert len(text.splitlines()) <= 40
        command = [Path(sys.executable).with_name("shellcheck"), "-"]
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_rendering_touches_nothing_and_no_folder_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    example = str(EXAMPLES / "tiny.toml")
    assert main(["launch", "render", example]) == 0
    assert list(tmp_path.iterdir()) == []
    assert main(["launch", "render", example, "--output-dir", str(tmp_path)]) == 64
    assert "File exists; give a new folder" in capsys.readouterr().err
    assert main(["launch", "render", example, "--output-dir", "new"]) == 0
    assert "lt ckpt export tiny/run --out tiny/model\n" in (tmp_path / "new" / "commands.sh").read_text()


@pytest.mark.parametrize("name", ["tiny.local", "hosts.ssh"])
def test_rendering_loads_nothing_heavy(name: str, modules_of: Callable[..., set[str]]) -> None:
    example, target = CASES[name]
    assert sorted(modules_of("launch", "render", str(EXAMPLES / example), "--on", target) & set(HEAVY)) == []
