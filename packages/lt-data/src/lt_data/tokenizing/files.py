"""Tokenizer files from a folder, a file, the Hugging Face hub, or an fsspec URL such as S3.

    path/to/folder        a folder with tokenizer.json, or the file itself
    org/name[@revision]   a model of the hub, if there is no such local path
    hf://org/name[@rev]   a model of the hub
    s3://bucket/prefix    the files under a prefix (any protocol that fsspec supports and whose package is installed)

Only the files of `TOKENIZER_FILES` are read. They are copied into the store, and from there into the exported model,
so a link out of the folder is refused: it would publish any file of the machine. Those of the hub are in Hugging Face's
own cache; each must have the hash of the hub's list (SHA-256 of large files, git's hash of small ones).
"""

import hashlib
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lt_data.errors import DataError
from lt_data.file_names import redact_url, to_portable_name
from lt_data.sources.transfer_errors import library_errors, open_filesystem, translate_transfer_errors
from lt_data.storage import check_inside_model

MODEL_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TOKENIZER_FILES = (MODEL_FILE, CONFIG_FILE, "special_tokens_map.json", "chat_template.jinja")
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_QUERY = re.compile(r"\?[^\s'\"]+")  # of a URL, which may be signed
_HUB_ADDRESS = re.compile(rf"(hf://)?({_NAME}/)?{_NAME}(@[^@\s]+)?")


def read_tokenizer_files(source: str | Path) -> tuple[str, Mapping[str, bytes]]:
    """Return the name (for messages) and the files of a tokenizer.

    Raises:
        DataError: missing, unreadable, or without `tokenizer.json`.
    """
    text = os.fspath(source)
    is_hub = _HUB_ADDRESS.fullmatch(text) and (text.startswith("hf://") or "/" in text)
    if is_hub and not os.path.lexists(text):
        name, files = _read_from_hub(text)
    elif "://" in text:
        name, files = _read_from_url(text)
    else:
        name, files = _read_from_path(Path(text))
    if MODEL_FILE not in files:
        hint = " (there is a SentencePiece tokenizer.model)" if Path(text, "tokenizer.model").is_file() else ""
        raise DataError(
            f"no tokenizer at {redact_url(text)}: give a folder with {MODEL_FILE}{hint}; transformers' AutoTokenizer "
            "writes it for most tokenizers (save_pretrained)"
        )
    return name, files


def _read_from_path(path: Path) -> tuple[str, Mapping[str, bytes]]:
    with translate_transfer_errors(str(path), str(path)):
        if path.is_file() and path.name != MODEL_FILE:
            return to_portable_name(path.name), {MODEL_FILE: path.read_bytes()}
        folder = path.parent if path.is_file() else path
        files: dict[str, bytes] = {}
        for name in TOKENIZER_FILES:
            file = folder / name
            if file != path:  # a file that the user names may be a link to anywhere
                check_inside_model(file, folder)
            if file.is_file():
                files[name] = file.read_bytes()
    return to_portable_name(os.path.basename(os.path.abspath(folder))), files


def _read_from_hub(address: str) -> tuple[str, Mapping[str, bytes]]:
    from huggingface_hub import HfApi, constants, hf_hub_download, try_to_load_from_cache  # imported here: slow

    repo, _, revision = address.removeprefix("hf://").partition("@")
    try:
        if constants.HF_HUB_OFFLINE:
            cached = {name: try_to_load_from_cache(repo, name, revision=revision or None) for name in TOKENIZER_FILES}
            files = {name: Path(path).read_bytes() for name, path in cached.items() if isinstance(path, str)}
            if not files:
                raise DataError(f"{address}: not in {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set; unset it")
            return f"{repo}@{revision or 'main'}", files
        info = HfApi().model_info(repo, revision=revision or None, files_metadata=True)
        commit = info.sha or ""
        listed = {file.rfilename: file for file in info.siblings or () if file.rfilename in TOKENIZER_FILES}
        paths = {name: hf_hub_download(repo, name, revision=revision or None) for name in listed}
        files = {name: Path(path).read_bytes() for name, path in paths.items()}
    except DataError:
        raise
    except (OSError, ValueError, *library_errors()) as exc:
        reason = _QUERY.sub("", " ".join(str(exc).split())) or type(exc).__name__
        raise DataError(
            f"cannot read hf://{repo}: {reason}; there is no folder {address} either: check the name, the network and, "
            "for a private or gated model, HF_TOKEN"
        ) from exc
    for name, content in files.items():
        _check(content, listed[name], f"hf://{repo}@{commit}: {name}")
    return f"{repo}@{commit[:12]}", files


def _check(content: bytes, listed: Any, what: str) -> None:
    """Compare a file with the hash of the hub's list."""
    if listed.lfs:
        wanted, found = listed.lfs.sha256, hashlib.sha256(content).hexdigest()
    else:
        header = b"blob %d\0" % len(content)
        wanted, found = listed.blob_id, hashlib.sha1(header + content, usedforsecurity=False).hexdigest()
    if found != wanted:
        raise DataError(f"{what}: {len(content)} bytes that are not those of the hub's list; empty the cache (HF_HOME)")


def _read_from_url(url: str) -> tuple[str, Mapping[str, bytes]]:
    shown = redact_url(url).rstrip("/").removesuffix(f"/{MODEL_FILE}")
    filesystem, root = open_filesystem(url, shown)
    root = root.rstrip("/").removesuffix(f"/{MODEL_FILE}")
    files: dict[str, bytes] = {}
    with translate_transfer_errors(shown, url):
        for name in TOKENIZER_FILES:
            with suppress(FileNotFoundError):
                files[name] = filesystem.cat_file(f"{root}/{name}")
    return shown.rpartition("/")[2], files
