"""One file of a hub, so that no byte is fetched twice and none is believed unseen.

Bytes are appended to `NAME.<identity>.part`, where the identity is a hash of the content's ETag: what is there already
is asked for no more (Range), and only when the ETag of the answer is still the one in the name; else the file is begun
anew. What stands in the file when all bytes are there must have the size and the SHA-256 that the hub's list gives (for
small files git's own hash); then it is fsynced and renamed. The SHA-256 is taken while the bytes come in; of what an
earlier process left, it is taken by reading it once.

A try that brought bytes does not count as one in vain: a line that breaks every gigabyte still gets there.
"""

import hashlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import xxhash

from lt_ckpt import files
from lt_ckpt.errors import CheckpointError, translate_os_errors
from lt_ckpt.folders import random_id
from lt_ckpt.hub.http import Answer, Hub, PassingError

BLOCK_BYTES = 2**20
SHA256, SHA1 = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")
_PART = re.compile(r"\.([0-9a-f]{16})\.part")
_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")


@dataclass(frozen=True, kw_only=True)
class HubFile:
    """A file as the hub lists it; None where it does not say.

    Attributes:
        name: Path in the repository.
        n_bytes: Its size.
        sha256: Hash of its bytes; the hub knows it for large files.
        blob: Git's hash of the file, or of the pointer that stands for a large file in git.
    """

    name: str
    n_bytes: int | None = None
    sha256: str | None = None
    blob: str | None = None


def download(
    hub: Hub, path: str, repo: str, file: HubFile, target: Path, told: Callable[[int], None] = lambda _: None
) -> int:
    """Downloads a file; the caller holds the lock of the folder.

    Args:
        hub: Whom to ask.
        path: Where, on the endpoint.
        repo: The repository, for messages.
        file: What is known of the file.
        target: The file to make. Its folder is there, it is not.
        told: Told how many bytes came in; negative when bytes had to be thrown away.

    Returns:
        Its size.

    Raises:
        CheckpointError: The hub refuses or does not answer, the bytes are not those listed, or the disk fails.
    """
    with translate_os_errors("downloading", target), _Download(hub, path, repo, file, target, told) as download:
        download.take_up()
        hub.insist(f"hf://{repo}: {file.name}", download.attempt)
        return download.size


class _Download:
    """A download under way: the unfinished file, its size and the hash of what is in it."""

    def __init__(
        self, hub: Hub, path: str, repo: str, file: HubFile, target: Path, told: Callable[[int], None]
    ) -> None:
        self.hub, self.path, self.repo, self.file, self.target, self.told = hub, path, repo, file, target, told
        self.size = 0
        self._part: Path | None = None
        self._descriptor = -1
        self._sha256 = hashlib.sha256()
        self._wanted = file.sha256
        self._most = 0
        self._spoilt = 0

    def __enter__(self) -> "_Download":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def take_up(self) -> None:
        """Takes up what an earlier process left; without a SHA-256 to prove it, that is thrown away."""
        for entry in sorted(os.listdir(self.target.parent)):
            if not entry.startswith(self.target.name) or not _PART.fullmatch(entry, len(self.target.name)):
                continue
            left = self.target.with_name(entry)
            if self._part is not None or self.file.sha256 is None:
                os.unlink(left)
                continue
            self._part = left
            self._descriptor = os.open(left, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            while block := os.read(self._descriptor, BLOCK_BYTES):
                self._sha256.update(block)
                self.size += len(block)
        self._most = self.size
        self.told(self.size)

    def _begin_anew(self) -> None:
        self._close()
        if self._part is not None:
            os.unlink(self._part)
        self._part = None
        self.told(-self.size)
        self.size, self._sha256 = 0, hashlib.sha256()

    def attempt(self) -> None:
        """Fetches what is missing and finishes the file.

        Raises:
            PassingError: To be called again.
        """
        before = self._most
        try:
            if self.size == 0 or self.size != self.file.n_bytes:
                self._fetch()
            self._finish()
        except PassingError as exc:
            exc.gained = self._most > before
            raise

    def _fetch(self) -> None:
        asked = self.size
        with self.hub.get(self.path, self.repo, {"Range": f"bytes={asked}-"} if asked else {}) as answer:
            if asked and not self._goes_on(answer):
                self._begin_anew()
                if answer.status != 200:
                    raise PassingError("what the hub holds is not what was begun: begun anew")
            elif not asked and answer.status != 200:
                raise PassingError(f"the hub answered {answer.status}")
            total = self._total(answer)
            if self.file.sha256 is None:  # the hub's ETag of a large file is its SHA-256
                self._wanted = answer.etag if answer.linked and SHA256.fullmatch(answer.etag) else None
            if self._part is None:
                self._create(answer)
            while self.size < total:
                block = answer.read(min(BLOCK_BYTES, total - self.size))
                if not block:
                    raise PassingError(f"the connection ended at byte {self.size} of {total}")
                files.write_all(self._descriptor, block)
                self._sha256.update(block)
                self.size += len(block)
                self._most = max(self._most, self.size)
                self.told(len(block))
            self._check_blob(answer)

    def _goes_on(self, answer: Answer) -> bool:
        """Tells whether an answer is the rest of what is here."""
        found = _CONTENT_RANGE.fullmatch(answer.headers.get("Content-Range", ""))
        if answer.status != 206 or found is None or int(found[1]) != self.size:
            return False
        return self._part is not None and self._part.name == self._part_name(answer)

    def _part_name(self, answer: Answer) -> str:
        # A weak ETag does not promise equal bytes, and without any there is no knowing: such a file is never taken up.
        sure = answer.etag and not answer.weak
        identity = xxhash.xxh3_64_hexdigest(answer.etag.encode()) if sure else random_id()
        return f"{self.target.name}.{identity}.part"

    def _create(self, answer: Answer) -> None:
        self._part = self.target.with_name(self._part_name(answer))
        self._descriptor = files.create_file(self._part)

    def _total(self, answer: Answer) -> int:
        """Returns how long the file is, after checking that all who say so agree."""
        found = _CONTENT_RANGE.fullmatch(answer.headers.get("Content-Range", ""))
        sent = int(found[3]) if answer.status == 206 and found else answer.number("Content-Length")
        sizes = {"the list": self.file.n_bytes, "the hub": answer.linked_bytes, "the answer": sent}
        known = {who: size for who, size in sizes.items() if size is not None}
        if not known:
            raise CheckpointError(f"hf://{self.repo}: {self.file.name}: nobody says how long it is")
        if len(set(known.values())) > 1:
            said = ", ".join(f"{who} {size}" for who, size in known.items())
            raise CheckpointError(
                f"hf://{self.repo}: {self.file.name}: its size is not clear (bytes by {said}); the hub or a proxy on "
                "the way is broken: try again later or by another way"
            )
        return next(iter(known.values()))

    def _check_blob(self, answer: Answer) -> None:
        """Checks a small file against git's hash, which is its ETag then."""
        if self._wanted is not None or self.file.blob is None or answer.etag != self.file.blob:
            return
        digest = hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)
        assert self._part is not None
        with open(self._part, "rb") as part:
            while block := part.read(BLOCK_BYTES):
                digest.update(block)
        self._compare(digest.hexdigest(), self.file.blob)

    def _compare(self, found: str, listed: str) -> None:
        if found == listed:
            return
        self._begin_anew()
        self._spoilt += 1
        if self._spoilt > 1:
            raise CheckpointError(
                f"hf://{self.repo}: {self.file.name}: came twice with other bytes than the hub lists (hash {found}, "
                f"not {listed}); a proxy on the way is broken, or the file: try again later or by another way"
            )
        raise PassingError("the bytes that came are not those that the hub lists")

    def _finish(self) -> None:
        if self._wanted is not None:
            self._compare(self._sha256.hexdigest(), self._wanted)
        assert self._part is not None
        files.fsync(self._descriptor)
        self._close()
        files.rename(self._part, self.target)
        files.fsync_folder(self.target.parent)
