"""Where a tokenizer's files come from: a folder, a file, a model on a Hugging Face hub, or an fsspec URL such as S3.

    path/to/folder        a folder that holds tokenizer.json, or the file itself
    org/name[@revision]   a model on the hub, when there is no such path here
    hf://org/name[@rev]   the same, whatever lies here
    s3://bucket/prefix    the files under a prefix (any protocol that fsspec knows and whose package is installed)

Only the files that make the tokenizer are read (`FILES`).
"""

import os
from collections.abc import Mapping
from pathlib import Path

from lt_data.errors import DataError
from lt_data.names import portable
from lt_data.storage import os_errors
from lt_data.tokenizing.hub_files import HubModel, is_short_address

MODEL_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
FILES = (MODEL_FILE, CONFIG_FILE, "special_tokens_map.json", "chat_template.jinja")


def tokenizer_files(source: str | Path) -> tuple[str, Mapping[str, bytes]]:
    """The name, for people, and the files of a tokenizer.

    Raises:
        DataError: nothing there, unreadable, or without `tokenizer.json`.
    """
    text = os.fspath(source)
    if text.startswith("hf://"):
        return _from_hub(text)
    if "://" in text:
        return _from_url(text)
    if is_short_address(text) and not os.path.lexists(text):
        return _from_hub(text)
    return _from_path(Path(text))


def _from_path(path: Path) -> tuple[str, Mapping[str, bytes]]:
    with os_errors("read the tokenizer", path):
        if path.is_file() and path.name != MODEL_FILE:
            return portable(path.name), {MODEL_FILE: path.read_bytes()}
        folder = path.parent if path.is_file() else path
        files = {name: (folder / name).read_bytes() for name in FILES if (folder / name).is_file()}
        if not folder.is_dir() or MODEL_FILE not in files:
            raise DataError(f"no tokenizer at {path}: it needs a folder that holds {MODEL_FILE}{_hint(folder)}")
    return portable(folder.resolve().name), files


def _from_hub(address: str) -> tuple[str, Mapping[str, bytes]]:
    model = HubModel.parse(address)
    commit, files = model.fetch(FILES)
    if MODEL_FILE not in files:
        raise DataError(
            f"hf://{model.repo}: has no {MODEL_FILE}; save its tokenizer in the fast format, and name that folder"
        )
    return f"{model.repo}@{commit[:12]}", files


def _from_url(url: str) -> tuple[str, Mapping[str, bytes]]:
    from fsspec.core import url_to_fs  # here, because it is slow to import and most tokenizers are local

    protocol = url.partition("://")[0]
    try:
        filesystem, root = url_to_fs(url)
    except (ImportError, ValueError) as exc:
        raise DataError(f"cannot read {url}: {exc}; install the fsspec package for {protocol}://") from exc
    root = root.rstrip("/")
    if root.endswith(f"/{MODEL_FILE}"):
        root = root.removesuffix(f"/{MODEL_FILE}")
    files: dict[str, bytes] = {}
    with os_errors("read the tokenizer", url):
        for name in FILES:
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
