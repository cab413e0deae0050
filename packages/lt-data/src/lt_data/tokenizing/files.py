"""Tokenizer files from a folder, a file, the Hugging Face hub, or an fsspec URL such as S3.

    path/to/folder        a folder with tokenizer.json, or the file itself
    org/name[@revision]   a model of the hub, if there is no such local path
    hf://org/name[@rev]   a model of the hub
    s3://bucket/prefix    the files under a prefix (any protocol that fsspec supports and whose package is installed)

Only the files of `TOKENIZER_FILES` are read, each of at most `MAX_FILE_BYTES`. A query of a web address, such as a
signature, is sent with each request and is in no message or name.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lt_data.errors import DataError
from lt_data.file_names import redact_url, to_portable_name
from lt_data.sources.transfer_errors import translate_transfer_errors
from lt_data.storage import read_file, translate_os_errors
from lt_data.tokenizing.hub_files import HubRepository, is_short_address

MODEL_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TOKENIZER_FILES = (MODEL_FILE, CONFIG_FILE, "special_tokens_map.json", "chat_template.jinja")
MAX_FILE_BYTES = 2**28
"""Larger than any known tokenizer by several times."""
_BLOCK_BYTES = 2**20


def read_tokenizer_files(source: str | Path) -> tuple[str, Mapping[str, bytes]]:
    """Return the name (for messages) and the files of a tokenizer.

    Raises:
        DataError: missing, unreadable, or without `tokenizer.json`.
    """
    text = os.fspath(source)
    if text.startswith("hf://"):
        return _read_from_hub(text)
    if "://" in text:
        return _read_from_url(text)
    if is_short_address(text) and not os.path.lexists(text):
        return _read_from_hub(text)
    return _read_from_path(Path(text))


def _read_from_path(path: Path) -> tuple[str, Mapping[str, bytes]]:
    with translate_os_errors("read the tokenizer", path):
        if path.is_file() and path.name != MODEL_FILE:
            return to_portable_name(path.name), {MODEL_FILE: read_file(path, max_bytes=MAX_FILE_BYTES)}
        folder = path.parent if path.is_file() else path
        files = {
            name: read_file(folder / name, max_bytes=MAX_FILE_BYTES)
            for name in TOKENIZER_FILES
            if (folder / name).is_file()
        }
        if not folder.is_dir() or MODEL_FILE not in files:
            raise DataError(f"no tokenizer at {path}: give a folder with {MODEL_FILE}{_hint(folder)}")
    return to_portable_name(folder.resolve().name), files


def _read_from_hub(address: str) -> tuple[str, Mapping[str, bytes]]:
    repository = HubRepository.parse(address)
    commit, files = repository.fetch(TOKENIZER_FILES, max_bytes=MAX_FILE_BYTES)
    if MODEL_FILE not in files:
        raise DataError(
            f"hf://{repository.name}: has no {MODEL_FILE}; save its tokenizer in the fast format, and give that folder"
        )
    return f"{repository.name}@{commit[:12]}", files


def _read_from_url(url: str) -> tuple[str, Mapping[str, bytes]]:
    from fsspec.core import url_to_fs  # imported here: slow, and most tokenizers are local

    protocol, shown = url.partition("://")[0], redact_url(url)
    try:
        filesystem, root = url_to_fs(url)
    except (ImportError, ValueError) as exc:
        reason = str(exc).replace(url, shown)
        raise DataError(f"cannot read {shown}: {reason}; install the fsspec package for {protocol}://") from exc
    query = ""
    if protocol in ("http", "https"):
        root, mark, query = root.partition("?")
        query = mark + query
    root = root.rstrip("/").removesuffix(f"/{MODEL_FILE}")
    files: dict[str, bytes] = {}
    for name in TOKENIZER_FILES:
        path = f"{root}/{name}{query}"
        with translate_transfer_errors(shown, path), suppress(FileNotFoundError):
            files[name] = _read_bounded(filesystem, path, f"{shown}: {name}")
    if MODEL_FILE not in files:
        raise DataError(f"no tokenizer at {shown}: there is no {MODEL_FILE} under it")
    return shown.rstrip("/").removesuffix(f"/{MODEL_FILE}").rpartition("/")[2], files


def _read_bounded(filesystem: Any, path: str, shown: str) -> bytes:
    info = filesystem.info(path)
    if info["type"] != "file":  # a pipe, at a file:// address, would be waited for
        raise DataError(f"{shown}: no regular file; put the file itself there")
    size = info.get("size")
    if size is not None and size <= MAX_FILE_BYTES:
        return filesystem.cat_file(path)
    content = b""
    if size is None:
        with filesystem.open(path, "rb") as file:
            while len(content) <= MAX_FILE_BYTES and (block := file.read(_BLOCK_BYTES)):
                content += block
    if size is not None or len(content) > MAX_FILE_BYTES:
        raise DataError(f"{shown}: more than the {MAX_FILE_BYTES} bytes that such a file may have; check what it is")
    return content


def _hint(folder: Path) -> str:
    if (folder / "tokenizer.model").is_file():
        return (
            " (there is a SentencePiece tokenizer.model: load it with transformers' AutoTokenizer and save it again, "
            "which writes the fast format)"
        )
    return ""
