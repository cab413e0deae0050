"""Wheels of lt's own packages, made again from what is installed, and the state of their sources.

lt is not published, so a release carries it. A wheel is made from the import package's files and the metadata that the
installer wrote, also of an editable installation; no build tool runs. The archive has fixed times and order, so the
same files give the same bytes. Where the sources are a git checkout, its commit and the difference to it are kept.

Cost: a read of a few megabytes per package.
"""

import base64
import hashlib
import io
import json
import subprocess
import zipfile
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlparse

from lt_trainer.release.errors import ReleaseError
from lt_trainer.run_directory.environment import list_package_files

LT_PACKAGES = ("lt-ckpt", "lt-data", "lt-launch", "lt-model", "lt-trainer", "lt-trainer-gpu", "lt-trainer-neuron")
METADATA_FILES = ("METADATA", "entry_points.txt")
EPOCH = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True, kw_only=True)
class SourceState:
    """Git state of lt's sources; empty where they are not a checkout.

    Attributes:
        commit: Commit, as hexadecimal text; "" if unknown.
        patch: Difference of the tracked files to it; "" for a clean checkout.
        untracked: Untracked files below the packages, relative to the repository.
    """

    commit: str = ""
    patch: str = ""
    untracked: tuple[str, ...] = ()

    @property
    def is_clean(self) -> bool:
        """True for a commit without changes."""
        return bool(self.commit) and not self.patch and not self.untracked


def lt_distributions() -> dict[str, Distribution]:
    """Return the installed packages of lt by name."""
    found: dict[str, Distribution] = {}
    for name in LT_PACKAGES:
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            continue
    return found


def make_wheel(package: Distribution) -> tuple[str, bytes]:
    """Return the file name and the bytes of a wheel of an installed package in pure Python."""
    name = package.name.replace("-", "_")
    stem = f"{name}-{package.version}"
    info = f"{stem}.dist-info"
    files = list_package_files(package.name)
    assert files, name
    entries = {f"{name}/{file}": path.read_bytes() for file, path in files.items()}
    for file in METADATA_FILES:
        text = package.read_text(file)
        if text is not None:
            entries[f"{info}/{file}"] = text.encode()
    for file, path in license_files(package).items():
        entries[f"{info}/licenses/{file}"] = path.read_bytes()
    entries[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: lt-release\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    record = "".join(
        f"{file},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for file, data in entries.items()
    )
    entries[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, data in entries.items():
            item = zipfile.ZipInfo(file, EPOCH)
            item.external_attr = 0o100644 << 16
            item.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(item, data)
    return f"{stem}-py3-none-any.whl", buffer.getvalue()


def license_files(package: Distribution) -> dict[str, Path]:
    """Return the license files that a package's metadata names; if editable, from its sources.

    Raises:
        ReleaseError: One is missing: a wheel without it would not be what its metadata says.
    """
    installed = {
        file.as_posix().partition(".dist-info/licenses/")[2]: Path(str(package.locate_file(file)))
        for file in package.files or ()
        if ".dist-info/licenses/" in file.as_posix()
    }
    sources = source_folder(package)
    found: dict[str, Path] = {}
    for name in package.metadata.get_all("License-File") or ():
        path = installed.get(name) or (None if sources is None else sources / name)
        if path is None or not path.is_file():
            raise ReleaseError(package.name, [f"its license file {name} is not there; install the package again"])
        found[name] = path
    return found


def source_folder(package: Distribution) -> Path | None:
    """Return the folder from which a package was installed, if it is one on this machine."""
    text = package.read_text("direct_url.json")
    url = urlparse(json.loads(text)["url"]) if text else None
    folder = Path(unquote(url.path)) if url is not None and url.scheme == "file" else None
    return folder if folder is not None and folder.is_dir() else None


def source_state(folder: Path | None) -> SourceState:
    """Return the git state of the repository around a folder; its hooks and monitors do not run."""
    top = "" if folder is None else _git(folder, "rev-parse", "--show-toplevel").strip()
    commit = _git(Path(top), "rev-parse", "HEAD").strip() if top else ""
    if not commit:
        return SourceState()
    packages = (":(top,glob)packages/*/src/**", ":(top,glob)packages/*/pyproject.toml")
    untracked = _git(Path(top), "ls-files", "--others", "--exclude-standard", "-z", "--", *packages)
    return SourceState(
        commit=commit,
        patch=_git(
            Path(top), "diff", "--no-color", "--no-ext-diff", "--no-textconv", "--binary", "HEAD", "--", *packages
        ),
        untracked=tuple(name for name in untracked.split("\0") if name),
    )


def _git(folder: Path, *arguments: str) -> str:
    options = ("--no-optional-locks", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")
    try:
        done = subprocess.run(
            ["git", *options, *arguments], cwd=folder, capture_output=True, text=True, errors="replace", check=False
        )
    except OSError:  # no git
        return ""
    return done.stdout if done.returncode == 0 else ""
