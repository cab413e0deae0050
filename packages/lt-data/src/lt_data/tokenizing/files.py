"""Tokenizer files from a folder, a file, the Hugging Face hub, or an fsspec URL such as S3.

    path/to/folder        a folder with tokenizer.json, or the file itself
    org/name[@revision]   a model of the hub, if there is no such local path
    hf://org/name[@rev]   a model of the hub
    s3://bucket/prefix    the files under a prefix (any protocol that fsspec supports and whose package is installed)

Only the files of `TOKENIZER_FILES` are read.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from lt_data.errors import DataError
from lt_data.file_names import to_portable_name
from lt_data.storage import translate_os_errors
from lt_data.tokenizing.hub_files import HubModel, is_short_address

MODEL_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TOKENIZER_FILES = (MODEL_FILE, CONFIG_FILE, "special_tokens_map.json", "chat_template.jinja")


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
            return to_portable_name(path.name), {MODEL_FILE: path.read_bytes()}
        folder = path.parent if path.is_file() else path
        files = {name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).is_file()}
        if not folder.is_dir() or MODEL_FILE not in files:
            raise DataError(f"no tokenizer at {path}: give a folder with {MODEL_FILE}{_hint(folder)}")
    return to_portable_name(folder.resolve().name), files


def _read_from_hub(address: str) -> tuple[str, Mapping[str, bytes]]:
    model = HubModel.parse(address)
    commit, files = model.fetch(TOKENIZER_FILES)
    if MODEL_FILE not in files:
        raise DataError(
            f"hf://{model.repo}: has no {MODEL_FILE}; save its tokenizer in the fast format, and give that folder"
        )
    return f"{model.repo}@{commit[:12]}", files


def _read_from_url(url: str) -> tuple[str, Mapping[str, bytes]]:
    from fsspec.core import url_to_fs  # imported here: slow, and most tokenizers are local

    protocol = url.partition("://")[0]
    try:
        filesystem, root = url_to_fs(url)
    except (ImportError, ValueError) as exc:
        raise DataError(f"cannot read {url}: {exc}; install the fsspec package for {protocol}://") from exc
    root = root.rstrip("/")
    if root.endswith(f"/{MODEL_FILE}"):
        root = root.removesuffix(f"/{MODEL_FILE}")
    files: dict[str, bytes] = {}
    with translate_os_errors("read the tokenizer", url):
        for name in TOKENIZER_FILES:
            try:
                files[name] = filesystem.cat_file(f"{root}/{name}")
            except FileNotFoundError:
                continue
    if MODEL_FILE not in files:
        raise DataError(f"no tokenizer at {url}: there is no {MODEL_FILE} under it")
    return root.rpartition("/")[2], files


def _hint(folder: Path) -> str:
    if (folder / "tokenizer.model").is_file():
        return (
            " (there is a SentencePiece tokenizer.model: load it with transformers' AutoTokenizer and save it again, "
            "which writes the fast format)"
        )
    return ""
