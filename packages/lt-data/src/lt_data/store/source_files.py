"""Source files of a store, as its manifest has them.

At most `MAX_LISTED_SOURCES` are listed in the manifest; more are in `sources.jsonl`.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lt_data.errors import DataError
from lt_data.store.manifest_checks import check_counts, check_hashes

MAX_LISTED_SOURCES = 1000  # more source files are listed in a file of their own


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A source file: name as given, size in bytes and SHA-256 of its content.

    `unchecked` names its compression if that file has content without a checksum; otherwise it is "".
    """

    path: str
    bytes: int
    sha256: str
    unchecked: str = ""

    def __post_init__(self) -> None:
        check_counts(bytes=self.bytes)
        check_hashes(f"sha256 of {self.path}", [self.sha256])


@dataclass(frozen=True, kw_only=True)
class SourceFiles:
    """Source files: their number, total bytes, and a SHA-256 over the lines "sha256 bytes path" in order.

    `listed` holds each file if there are at most `MAX_LISTED_SOURCES`; otherwise they are in `sources.jsonl`, whose
    SHA-256 is `list_sha256`. `skipped_links` counts symbolic links that led out of a source folder (or to a folder) and
    were not followed. `unchecked` counts, by compression, the files with content that no checksum confirms, so that
    damage may have gone unnoticed.
    """

    files: int = 0
    bytes: int = 0
    sha256: str = hashlib.sha256().hexdigest()
    skipped_links: int = 0
    listed: tuple[SourceFile, ...] = ()
    unchecked: Mapping[str, int] = field(default_factory=dict)
    list_sha256: str = ""

    def __post_init__(self) -> None:
        check_counts(files=self.files, bytes=self.bytes, skipped_links=self.skipped_links)
        check_counts(**self.unchecked)
        listed_bytes = sum(file.bytes for file in self.listed)
        if self.listed and (len(self.listed), listed_bytes) != (self.files, self.bytes):
            counts = f"{self.files} files of {self.bytes} bytes"
            raise DataError(f"sources: {counts}, but {len(self.listed)} files of {listed_bytes} bytes are listed")
        check_hashes("sha256 of the sources", [self.sha256, *([self.list_sha256] if self.list_sha256 else [])])


def combine_source_files(sources: Sequence[SourceFiles]) -> SourceFiles:
    """Return the source files of several parts of a store together; a part keeps the list of many files itself."""
    if len(sources) == 1:
        return sources[0]
    listed = tuple(file for each in sources for file in each.listed)
    n_files = sum(each.files for each in sources)
    return SourceFiles(
        files=n_files,
        bytes=sum(each.bytes for each in sources),
        sha256=hashlib.sha256("".join(f"{each.sha256}\n" for each in sources).encode()).hexdigest(),
        skipped_links=sum(each.skipped_links for each in sources),
        listed=listed if len(listed) == n_files <= MAX_LISTED_SOURCES else (),
        unchecked=dict(sum((Counter(each.unchecked) for each in sources), Counter[str]())),
    )
