"""A person's own modules in the working directory are not taken for libraries of the same name: Python runs with -P."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parents[1] / "packages"
NAMES = ("datasets.py", "lt_trainer.py", "lt_data.py", "random.py", "tokenizers/__init__.py")
STARTS = re.compile(r'(?:sys\.executable|str\(python\)|\bpython|"python")\]?, "-m"')
"""Words of a command line that starts Python without -P or -I."""


def test_ranks_of_torchrun_import_nothing_from_the_working_directory(prepared: Path, tmp_path: Path) -> None:
    for name in NAMES:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("raise SystemExit('imported from the working directory')\n")
    command = [Path(sys.executable).with_name("lt"), "train", "torchrun", prepared / "run.toml"]
    options = ["--nproc-per-node", "2", "--set", "schedule.max_steps=2", "--set", "schedule.warmup_steps=1"]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *options], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("package", sorted(path.name for path in PACKAGES.iterdir()))
def test_every_python_is_started_with_a_safe_path(package: str) -> None:
    for path in (PACKAGES / package / "src").rglob("*.py"):
        found = STARTS.findall(path.read_text(encoding="utf-8"))
        assert not found, f"{path}: start Python with -P before {found[0]}"
