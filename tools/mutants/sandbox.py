"""A copy of the checkout with an environment of its own, in which tests meet changed code.

The copy is a clone of HEAD in a temporary folder, so that no mistake of a tool ever reaches the checkout; what is not
committed is not in it. uv links the environment from its cache (seconds, no space).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOL = Path(__file__).resolve().parent
CACHE = ROOT / ".mutants"
"""Map of lines and results of the last runs; not part of the repository."""


@dataclass(frozen=True, kw_only=True)
class Sandbox:
    """Clone and its environment."""

    root: Path
    commit: str

    @property
    def python(self) -> Path:
        """Interpreter of the environment."""
        return self.root / ".venv" / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        """Folder of installed modules."""
        (folder,) = (self.root / ".venv" / "lib").glob("python*/site-packages")
        return folder

    def pytest(self, arguments: Sequence[str | Path]) -> tuple[list[str], Mapping[str, str]]:
        """Return command and environment of the default tests, one after another, with fixed examples."""
        options = ["-q", "-m", "not slow", "-p", "no:cacheprovider", "--hypothesis-profile=ci"]
        command = [str(self.python), "-m", "pytest", *options, *map(str, arguments)]
        dropped = ("PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT", "PYTHONPATH")
        environment = {name: value for name, value in os.environ.items() if name not in dropped}
        return command, environment | {"OMP_NUM_THREADS": "1"}


def run(*command: str | Path, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> str:
    """Run a command that has to succeed; returns its output."""
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=env, check=True, stdout=subprocess.PIPE)
    return done.stdout.decode().strip()


@contextmanager
def sandbox(kept: Path | None = None) -> Iterator[Sandbox]:
    """Make a sandbox of HEAD; it is gone afterwards, unless it is to be kept: then the next call goes on with it."""
    folder = kept or Path(tempfile.mkdtemp(prefix="lt-mutants-"))
    try:
        root = folder / "lt"
        if not root.exists():
            run("git", "clone", "--quiet", "--shared", ROOT, root)
        commit = run("git", "rev-parse", "HEAD")
        run("git", "checkout", "--quiet", "--force", "--detach", commit, cwd=root)
        run("git", "clean", "--quiet", "--force", "-d", cwd=root)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("UV_PROJECT", "VIRT"))}
        run("uv", "sync", "--quiet", "--locked", cwd=root, env=environment)
        yield Sandbox(root=root, commit=commit)
    finally:
        if kept is None:
            shutil.rmtree(folder)
