"""Code of a release: lt's own sources, and the pins of all other packages.

    source/lt.tar.gz           `git archive` of the commit: packages, project file and lock
    source/lt.patch            the difference of the working tree to it, new files too; absent for a clean one
    source/requirements.txt    `uv export` of the lock: exact versions with hashes
    source/LICENSE             license of lt

No hook or monitor of the repository runs, and no network is asked. Cost: seconds.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from importlib.metadata import distribution
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from urllib.parse import unquote, urlparse

from lt_trainer.release.bundle import CODE_LICENSE, REQUIREMENTS, SOURCE_ARCHIVE, SOURCE_PATCH, ReleaseError

ARCHIVED = (
    *("LICENSE", "pyproject.toml", "uv.lock"),
    *(f":(glob)packages/*/{name}" for name in ("LICENSE", "README.md", "pyproject.toml", "src/**")),
)
"""What of the repository is released: all that its packages are built from."""
GIT = ("git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")


class SourceTree(NamedTuple):
    """Git checkout from which lt is installed.

    Attributes:
        root: Its top folder.
        commit: Its commit.
        license: License of lt, an SPDX expression.
    """

    root: Path
    commit: str
    license: str


def find_source_tree() -> SourceTree:
    """Return the checkout from which lt-trainer is installed.

    Raises:
        ReleaseError: There is none, or git or uv is missing.
    """
    trainer = distribution("lt-trainer")
    url = urlparse(json.loads(trainer.read_text("direct_url.json") or "{}").get("url", ""))
    if url.scheme != "file" or not (shutil.which("uv") and shutil.which("git")):
        problem = "not installed from a folder, or uv and git are missing; a release carries lt's sources: install lt "
        raise ReleaseError("lt", [problem + "with uv from a git checkout"])
    root = Path(_git(Path(unquote(url.path)), "rev-parse", "--show-toplevel").decode().strip())
    commit = _git(root, "rev-parse", "HEAD").decode().strip()
    return SourceTree(root=root, commit=commit, license=trainer.metadata["License-Expression"])


def release_sources(bundle: Path, tree: SourceTree, engine: str) -> None:
    """Write source/ of a release.

    Args:
        bundle: The release.
        tree: The checkout.
        engine: Engine of the run, whose packages are pinned: its name is a dependency group of the workspace.

    Raises:
        ReleaseError: git or uv failed.
    """
    (bundle / "source").mkdir()
    (bundle / SOURCE_ARCHIVE).write_bytes(_git(tree.root, "archive", "--format=tar.gz", "HEAD", "--", *ARCHIVED))
    with TemporaryDirectory() as folder:
        index = {"GIT_INDEX_FILE": f"{folder}/index"}  # of our own: the user's stays as it is
        _git(tree.root, "read-tree", "HEAD", **index)
        _git(tree.root, "add", "--all", "--", *ARCHIVED, **index)
        options = ("--no-color", "--no-ext-diff", "--no-textconv", "--binary")
        patch = _git(tree.root, "diff", "--cached", *options, "HEAD", "--", *ARCHIVED, **index)
    if patch:
        (bundle / SOURCE_PATCH).write_bytes(patch)
    groups = ("--no-default-groups", "--group", "lt", "--group", engine)
    command = ("uv", "export", "--quiet", "--frozen", *groups, "--no-emit-workspace", "--no-header", "--no-annotate")
    (bundle / REQUIREMENTS).write_bytes(_output(command, tree.root, {}))
    shutil.copyfile(tree.root / "LICENSE", bundle / CODE_LICENSE)


def _git(folder: Path, *arguments: str, **variables: str) -> bytes:
    return _output((*GIT, *arguments), folder, variables)


def _output(command: tuple[str, ...], folder: Path, variables: Mapping[str, str]) -> bytes:
    done = subprocess.run(command, cwd=folder, env=os.environ | variables, capture_output=True, check=False)
    if done.returncode:
        raise ReleaseError(" ".join(command), [done.stderr.decode("utf-8", "replace").strip()])
    return done.stdout
