"""What `lt launch render` prints for the examples, held by golden files; what it must not load.

The files in golden/ are written anew with LT_WRITE_GOLDEN=1.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
GOLDEN = Path(__file__).with_name("golden")
EXAMPLES = [("tiny", "local"), ("hosts", "ssh")]
HEAVY = ("torch", "numpy", "boto3", "botocore", "yaml", "rich", "transformers", "lt_data")


def render(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "lt_launch", "launch", "render", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)


def stable(name: str, text: str) -> str:
    """The text without what depends on more than the example: the hash of all values of a recipe."""
    return re.sub(r'"recipe": "[0-9a-f]{64}"', '"recipe": "HASH"', text)


@pytest.mark.parametrize(("example", "target"), EXAMPLES)
def test_the_examples_render_as_the_golden_files_say(example: str, target: str, tmp_path: Path) -> None:
    profile = tmp_path / "profile.toml"
    profile.write_text('python = "python3"\n' if target == "local" else "")
    out = tmp_path / "out"
    render(f"examples/launch/{example}.toml", "--on", target, "--profile", profile, "--output-dir", out)
    files = {path.relative_to(out).as_posix(): path for path in sorted(out.rglob("*")) if path.is_file()}
    found = {name: stable(name, path.read_text()) for name, path in files.items() if not name.endswith("recipe.toml")}
    golden = GOLDEN / f"{example}.{target}"
    if os.environ.get("LT_WRITE_GOLDEN"):
        golden.mkdir(parents=True, exist_ok=True)
        for name, text in found.items():
            (golden / name).write_text(text)
    assert found == {
        path.relative_to(golden).as_posix(): path.read_text() for path in golden.rglob("*") if path.is_file()
    }


def test_what_is_printed_is_what_a_launch_keeps(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[job]\nargv = ["true"]\n')
    environ = {**os.environ, "LT_LAUNCH_HOME": str(tmp_path)}
    for arguments in (["render", "run.toml", "--output-dir", "rendered"], ["run", "run.toml"]):
        subprocess.run([sys.executable, "-m", "lt_launch", "launch", *arguments], cwd=tmp_path, env=environ, check=True)
    kept = tmp_path / "runs" / "run" / "launch" / "rendered"
    assert (kept / "run.spec.json").read_text() == (tmp_path / "rendered" / "run.spec.json").read_text()


def test_rendering_touches_nothing(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[job]\nargv = ["true"]\n')
    subprocess.run(
        [sys.executable, "-m", "lt_launch", "launch", "render", "run.toml"],
        cwd=tmp_path,
        capture_output=True,
        check=True,
    )
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


def test_a_folder_that_is_there_is_not_written_into(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "lt_launch",
        "launch",
        "render",
        "examples/launch/tiny.toml",
        "--output-dir",
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, list(tmp_path.iterdir())) == (64, [])
    assert "exists already" in done.stderr


@pytest.mark.parametrize(("example", "target"), EXAMPLES)
def test_rendering_loads_nothing_heavy(example: str, target: str) -> None:
    program = (
        "import json, sys\nfrom lt_launch.__main__ import main\ncode = main(sys.argv[1:])\n"
        "sys.stderr.write(json.dumps([code, sorted(sys.modules)]))"
    )
    command = [sys.executable, "-c", program, "launch", "render", f"examples/launch/{example}.toml", "--on", target]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    code, modules = json.loads(done.stderr)
    assert code == 0
    assert sorted({module.partition(".")[0] for module in modules} & set(HEAVY)) == []
