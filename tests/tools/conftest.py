"""The tools as modules, and a small workspace with a history for them to work on."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tools" / "mutants"), str(Path(__file__).parent)]

from small_workspace import git, write_package  # noqa: E402


@pytest.fixture
def small_workspace_dir(tmp_path: Path) -> Path:
    """lt-top stands on lt-mid, lt-mid on lt-base, lt-side on nothing; all of 0.1.0 and released by tags."""
    write_package(tmp_path, "lt-base")
    write_package(tmp_path, "lt-mid", "lt-base>=0.1,<0.2")
    write_package(tmp_path, "lt-top", "lt-mid[cli]>=0.1,<0.2")
    write_package(tmp_path, "lt-side")
    git("init", "--quiet", "--initial-branch=main", cwd=tmp_path)
    git("add", ".", cwd=tmp_path)
    git("commit", "--quiet", "-m", "First", cwd=tmp_path)
    for name in ("lt-base", "lt-mid", "lt-side", "lt-top"):
        git("tag", f"{name}-v0.1.0", cwd=tmp_path)
    return tmp_path


@pytest.fixture
def commit(small_workspace_dir: Path) -> Callable[..., None]:
    """Commit everything in the small workspace."""

    def do(message: str = "Change") -> None:
        git("add", ".", cwd=small_workspace_dir)
        git("commit", "--quiet", "--allow-empty", "-m", message, cwd=small_workspace_dir)

    return do
