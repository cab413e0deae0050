"""Layout of a release and its record `release.json`: what its other files do not say.

    release.json               `Release`
    licences.toml              names, licenses, origins of sources, as they were given
    model/, checkpoints/       weights (`weight_files`), weights.json
    data/, sources/            manifests, packs, tokens, texts (`data_files`)
    recipe/recipe.toml         the recipe with the paths of the release
    run/                       records of the run and its evaluation, filtered; `lt train report` reads them
    source/                    lt itself, pins of the other packages (`source_files`)
    reproduce.sh               the commands that repeat the run (`script`)
    README.md, DATA_CARD.md, REPORT.md, mof.yml
    SHA256SUMS                 a hash of every file

Names in these files are others' text: `InsidePath` refuses all that leads out of the folder.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from lt_ckpt.errors import CheckpointError
from lt_ckpt.hash_list import HASH_LIST, read_hash_list
from lt_data.file_names import check_name
from lt_trainer.errors import TrainerError

LICENSE_FILE = "licences.toml"
SOURCE_ARCHIVE, SOURCE_PATCH, REQUIREMENTS = "source/lt.tar.gz", "source/lt.patch", "source/requirements.txt"
CODE_LICENSE = "source/LICENSE"
"""Text of lt's own license; no text of another license is in a release."""
RUN_DIR = "reproduced"
"""run.dir of the released recipe."""


class ReleaseError(TrainerError):
    """Release that cannot be made, verified or reproduced; commands exit with 64.

    Args:
        subject: What was asked for, as the beginning of the message.
        problems: Each missing or wrong thing: field, value, source and remedy.
    """

    def __init__(self, subject: str, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(f"{subject}:\n" + "\n".join(f"  - {indent_lines(problem, 4)}" for problem in problems))


def indent_lines(text: str, width: int) -> str:
    """Return a text whose further lines are indented, so that none looks like one of ours."""
    return ("\n" + " " * width).join(text.splitlines())


def check_inside(path: str) -> str:
    """Return a path that is one of a file or folder below the folder that it is relative to, or "".

    Raises:
        ValueError: It is absolute, or leads out of that folder.
    """
    return path and check_name(path, "a release", ValueError)


InsidePath = Annotated[str, AfterValidator(check_inside)]


class Record(BaseModel):
    """Immutable entry of a release's own files; unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ReleasedStore(Record):
    """Store of the run: its field of the recipe, the fingerprint that the run has read, and how it was made."""

    field: str
    fingerprint: str
    joined: bool
    """Joined from others, or appended to."""


class Release(Record):
    """Contents of release.json.

    Attributes:
        commit: Commit of lt's sources; they are it with source/lt.patch, if there is one.
        code_license: License of lt.
        date: Day of the run's last event, UTC.
        step: Step of the final weights.
        earlier_steps: Steps of the other released weights.
        python: Version of the run's Python.
        stores: Name in the release → store.
    """

    format: Literal["lt-release"] = "lt-release"
    version: Literal[1] = 1
    commit: str
    code_license: str
    date: str
    step: int
    earlier_steps: Sequence[int]
    python: str = Field(pattern=r"^\d+\.\d+\.\d+[0-9A-Za-z.+]*$")
    stores: Mapping[InsidePath, ReleasedStore]


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file, as hexadecimal text."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def list_files(bundle: Path) -> list[str]:
    """Return the files of a release but its hash list, relative to it."""
    names = sorted(path.relative_to(bundle).as_posix() for path in bundle.rglob("*") if path.is_file())
    return [name for name in names if name != HASH_LIST]


def check_hashes(bundle: Path, expect: str = "") -> tuple[str, int, list[str]]:
    """Compare every file with the hash list.

    Args:
        bundle: Folder of a release.
        expect: SHA-256 that the list itself must have; "" for any.

    Returns:
        SHA-256 of the list, number of listed files, problems.

    Raises:
        ReleaseError: There is no release in the folder.
    """
    if not (bundle / HASH_LIST).is_file():
        raise ReleaseError(f"DIR = {bundle}", [f"not a release (it has no {HASH_LIST})"])
    digest = hash_file(bundle / HASH_LIST)
    problems = [] if expect.lower() in ("", digest) else [f"{HASH_LIST}: is {digest}, expected {expect}"]
    try:
        listed = read_hash_list(bundle)
    except CheckpointError as exc:
        return digest, 0, [*problems, str(exc)]
    assert listed is not None
    for name in listed.hashes:
        try:
            listed.check_file(name)
        except CheckpointError as exc:
            problems.append(str(exc))
    problems += [f"{name}: is not in {HASH_LIST}" for name in listed.find_unlisted()]
    return digest, len(listed.hashes), problems
