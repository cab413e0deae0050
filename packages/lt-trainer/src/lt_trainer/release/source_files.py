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
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import unquote, urlparse

from lt_trainer.release.bundle import CODE_LICENSE, REQUIREMENTS, SOURCE_ARCHIVE, SOURCE_PATCH, ReleaseError

LT_PACKAGES = ("lt-ckpt", "lt-data", "lt-launch", "lt-model", "lt-trainer", "lt-trainer-gpu", "lt-trainer-neuron")
ARCHIVED = (
    *("LICENSE", "pyproject.toml", "uv.lock"),
    *(f":(glob)packages/*/{name}" for name in ("LICENSE", "README.md", "pyproject.toml", "src/**")),
)
"""What of the repository is released: all that its packages are built from."""
GIT = ("git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")


@dataclass(frozen=True, kw_only=True)
class SourceTree:
    """Git checkout from which lt is installed.

    Attributes:
        root: Its top folder.
        commit: Its commit.
        versions: Versions of lt's packages.
        license: License of lt, an SPDX expression.
    """

    root: Path
    commit: str
    versions: dict[str, str]
    license: str


def find_source_tree() -> SourceTree:
    """Return the checkout from which lt-trainer is installed.

    Raises:
        ReleaseError: There is none, or git or uv is missing.
    """
    packages: dict[str, Distribution] = {}
    for name in LT_PACKAGES:
        try:
            packages[name] = distribution(name)
        except PackageNotFoundError:
            continue
    trainer = packages["lt-trainer"]
    url = urlparse(json.loads(trainer.read_text("direct_url.json") or "{}").get("url", ""))
    folder = Path(unquote(url.path))
    try:
        if url.scheme != "file" or not folder.is_dir() or not (shutil.which("uv") and shutil.which("git")):
            raise ReleaseError("lt", ["not installed from a folder, or uv and git are missing"])
        root = Path(_git(folder, "rev-parse", "--show-toplevel").decode().strip())
        commit = _git(root, "rev-parse", "HEAD").decode().strip()
    except ReleaseError as exc:
        problem = f"{exc.problems[0]}; a release carries lt's sources: install lt with uv from a git checkout"
        raise ReleaseError("lt", [problem]) from exc
    versions = {name: package.version for name, package in packages.items()}
    return SourceTree(root=root, commit=commit, versions=versions, license=trainer.metadata["License-Expression"])


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
