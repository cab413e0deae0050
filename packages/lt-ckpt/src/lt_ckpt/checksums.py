"""Verification of a source's bytes before they are used: one pass over its files.

Checkpoints of lt have a hash per slice (`integrity.py`); a folder that a conversion wrote, or that came with one, has a
list of its files' hashes (`hash_list.py`). Other files have nothing that would show damage.
"""

from collections.abc import Iterable, Iterator

from lt_ckpt.errors import CheckpointError
from lt_ckpt.files import ProgressCallback
from lt_ckpt.hash_list import HASH_LIST, HashList
from lt_ckpt.hf.folder import CONFIG
from lt_ckpt.integrity import verify
from lt_ckpt.parallel import ByteCounter, iter_in_threads
from lt_ckpt.source import Source


def describe_checksums(source: Source) -> str:
    """Return a sentence on whether a source's files have checksums."""
    if source.format == "lt":
        return "every file has checksums"
    if source.hash_list is not None:
        return f"every file has checksums ({HASH_LIST} lists {len(source.hash_list.hashes)} files)"
    return f"its files have no checksums ({source.format}), so damaged bytes look like good ones"


def iter_damages(source: Source, *, progress: ProgressCallback | None = None) -> Iterator[str]:
    """Yield what is wrong with a source's files according to their checksums; nothing when all match.

    A listed file that is missing and, of a list, one that is not listed are wrong too: readers take files by name.
    """
    if source.is_verified:
        return
    if source.format == "lt":
        yield from verify(source.path, progress=progress).problems
    elif source.hash_list is not None:
        yield from _iter_changed_files(source.hash_list, source.hash_list.hashes, progress)
        for file in source.hash_list.find_unlisted():
            yield (
                f"{source.hash_list.folder / file}: is not in {HASH_LIST}; remove it or, if it is yours, append the "
                f"output of `sha256sum {file}` to the list"
            )


def check_undamaged(source: Source, *, progress: ProgressCallback | None = None) -> None:
    """Compare the files of a source with their checksums before its bytes are used.

    The configuration is left out: opening compared it, unless another one was given.

    Raises:
        CheckpointError: Names the first file that is damaged, missing, or holds tensors and is not listed.
    """
    if source.format == "lt" or source.hash_list is None:
        problems = iter_damages(source, progress=progress)
    else:
        listed = source.hash_list
        unlisted = sorted(source.files() - set(listed.hashes))
        if unlisted:
            raise CheckpointError(f"{listed.folder / unlisted[0]}: holds tensors and is not in {HASH_LIST}")
        problems = _iter_changed_files(listed, {file for file in listed.hashes if file != CONFIG}, progress)
    for problem in problems:
        raise CheckpointError(problem)


def _iter_changed_files(listed: HashList, names: Iterable[str], progress: ProgressCallback | None) -> Iterator[str]:
    files = sorted(names)
    there = [path for file in files if (path := listed.folder / file).is_file()]
    count_bytes = ByteCounter(sum(path.stat().st_size for path in there), progress)

    def check(file: str) -> str:
        try:
            listed.check_file(file, count_bytes)
        except CheckpointError as exc:
            return str(exc)
        return ""

    yield from filter(None, iter_in_threads(check, [(file,) for file in files]))
