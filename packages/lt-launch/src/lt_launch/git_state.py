"""State of the working folder's repository at a launch: commit, changed files, and a patch of them.

Of untracked files name, size and hash are kept, their content only when the user asks for it. Files whose name or
content looks like a secret stay out of the patch and are listed. No program of the repository runs. Cost: some calls of
git, and reading the untracked files of up to 16 MiB.
"""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lt_launch.secrets import SECRET_FILES, find_secret

__all__ = ["git_state"]

GIT_SETTINGS = {
    "core.quotepath": "off",
    "core.fsmonitor": "false",
    "core.hooksPath": "/dev/null",
    "protocol.allow": "never",
}
"""Of every git call: the repository's monitor, hooks and ways to fetch, which are programs, do not run."""
GIT_DIFF_ARGS = ["--binary", "--no-color", "--no-ext-diff", "--no-textconv", "--src-prefix=a/", "--dst-prefix=b/"]
"""Options that make a patch portable, independent of the user's git configuration."""
MAX_PATCHED_BYTES, MAX_PATCHED_FILES = 1 << 20, 200
"""Size and number of the untracked files whose content can be kept."""
MAX_HASHED_BYTES = 16 << 20
"""Largest untracked file that is hashed."""


def git_state(folder: Path, *, include_untracked: bool = False) -> tuple[dict[str, Any], str]:
    """Return the commit of a working folder and a patch of its uncommitted changes.

    Args:
        folder: any folder of the repository.
        include_untracked: keep the content of small untracked files in the patch.

    Returns:
        commit, branch, changed files (relative to the top of the repository) and those of them that are not in the
        patch, untracked files with bytes, sha256 and whether they are in it; and the patch. Both are empty without
        git or a repository.
    """
    try:
        root = _git(folder, "rev-parse", "--show-toplevel").strip()
        if not root:
            return {}, ""
        top = Path(root)
        patch, changed, excluded = _changes(top)
        untracked = {
            name: _describe_file(top / name)
            for name in _git(top, "ls-files", "--others", "--exclude-standard", "-z").split("\0")
            if name
        }
        if include_untracked:
            patch += _include_untracked(top, untracked)
        state = {
            "root": root,
            "commit": _git(top, "rev-parse", "HEAD").strip(),
            "branch": _git(top, "rev-parse", "--abbrev-ref", "HEAD").strip(),
            "changed": changed,
            "changed_excluded": excluded,
            "untracked": untracked,
        }
    except OSError:
        return {}, ""
    return state, patch


def _git(folder: Path, *arguments: str, code: int = 0) -> str:
    """Return what git prints, with the settings above and without the repository's filters, which are programs."""
    pattern = r"^filter\..*\.(clean|smudge|process)$"
    filters = _run_git(folder, ["config", "-z", "--name-only", "--get-regexp", pattern], GIT_SETTINGS).split("\0")
    emptied = {name: "" for name in filters if name}
    required = {f"{name.rpartition('.')[0]}.required": "false" for name in emptied}
    return _run_git(folder, arguments, {**GIT_SETTINGS, **emptied, **required}, code)


def _run_git(folder: Path, arguments: Sequence[str], settings: Mapping[str, str], code: int = 0) -> str:
    env = {"GIT_CONFIG_COUNT": str(len(settings))}
    for at, (name, value) in enumerate(settings.items()):
        env |= {f"GIT_CONFIG_KEY_{at}": name, f"GIT_CONFIG_VALUE_{at}": value}
    result = subprocess.run(
        ["git", "--no-optional-locks", *arguments],
        cwd=folder,
        env=os.environ | env,
        capture_output=True,
        text=True,
        errors="surrogateescape",
        check=False,
    )
    return result.stdout if result.returncode == code else ""


def _changes(top: Path) -> tuple[str, list[str], list[str]]:
    """Return the patch of tracked files, the names of the changed ones, and of those left out."""
    changed = [name for name in _git(top, "diff", "--no-renames", "--name-only", "-z", "HEAD").split("\0") if name]
    secret = [name for name in changed if SECRET_FILES.search(name)]
    patch = _diff(top, secret)
    if find_secret(patch):  # rarely: then file by file
        secret = [name for name in changed if name in secret or find_secret(_diff_file(top, name))]
        patch = _diff(top, secret)
    return patch, changed, secret


def _diff(top: Path, without: list[str]) -> str:
    exclusions = [f":(top,exclude,literal){name}" for name in without]
    return _git(top, "diff", "--no-renames", *GIT_DIFF_ARGS, "HEAD", "--", ":(top)", *exclusions)


def _diff_file(top: Path, name: str) -> str:
    return _git(top, "diff", "--no-renames", *GIT_DIFF_ARGS, "HEAD", "--", f":(top,literal){name}")


def _describe_file(path: Path) -> dict[str, Any]:
    """Return the size of an untracked file, and its hash if it is a regular file that is small enough."""
    try:
        status = path.lstat()
        is_hashed = stat.S_ISREG(status.st_mode) and status.st_size <= MAX_HASHED_BYTES
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if is_hashed else ""
    except OSError:  # gone or unreadable: listed by name
        return {"bytes": 0, "sha256": "", "in_patch": False}
    return {"bytes": status.st_size, "sha256": digest, "in_patch": False}


def _include_untracked(top: Path, untracked: dict[str, dict[str, Any]]) -> str:
    """Return the patch that adds the small untracked files without secrets, and mark them."""
    patch, number = "", 0
    for name, described in untracked.items():
        if number == MAX_PATCHED_FILES or SECRET_FILES.search(name):
            continue
        if not described["sha256"] or described["bytes"] > MAX_PATCHED_BYTES:
            continue
        added = _git(top, "diff", *GIT_DIFF_ARGS, "--no-index", "--", "/dev/null", name, code=1)
        if not added or find_secret(added):
            continue
        described["in_patch"] = True
        patch, number = patch + added, number + 1
    return patch
