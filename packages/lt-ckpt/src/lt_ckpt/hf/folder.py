"""Hugging Face Llama folder: config.json, safetensors or torch files by name, tokenizer files.

The index and every header are read and checked on opening (an index may not point out of the folder, name a tensor that
its file lacks, or omit one); tensor bytes are read only on demand, any slice of them.
Cost: open: the headers; read: the requested bytes.
"""

import re
from pathlib import Path
from typing import Any

from lt_ckpt import files, json_objects
from lt_ckpt.confined_files import read_confined, resolve_confined
from lt_ckpt.errors import CheckpointError, translate_os_errors
from lt_ckpt.file_names import check_name
from lt_ckpt.tensorfile import StoredArray, read_header

CONFIG, SINGLE_FILE, INDEX_FILE = "config.json", "model.safetensors", "model.safetensors.index.json"
BIN_FILE, BIN_INDEX_FILE = "pytorch_model.bin", "pytorch_model.bin.index.json"
WEIGHT_FILES = (INDEX_FILE, SINGLE_FILE, BIN_INDEX_FILE, BIN_FILE)
TIED_HEAD = "lm_head.weight"
TOKENIZER_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
CHAT_TEMPLATES = "additional_chat_templates"
"""Folder of a tokenizer's named chat templates: NAME.jinja."""
CHAT_TEMPLATE = re.compile(rf"{CHAT_TEMPLATES}/[A-Za-z0-9_][A-Za-z0-9_.\-]{{0,120}}\.jinja")
GENERATION_CONFIG = "generation_config.json"
MAX_JSON_BYTES = 2**28


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file of a model's folder.

    Raises:
        CheckpointError: It is missing, is a link out of the folder, or holds anything else.
    """
    with translate_os_errors("reading", path):
        raw = files.read_bounded(resolve_confined(path.parent, path.name), MAX_JSON_BYTES)
    return json_objects.loads(raw, str(path))


def read_weight_map(index: Path) -> dict[str, Any]:
    """Read an index: tensor → what it names as the file."""
    with json_objects.translate_format_errors(str(index)):
        return dict(read_json(index)["weight_map"])


def is_model_file(name: str) -> bool:
    """Return True for the small files of a model that opening it reads as wholes."""
    names = (CONFIG, INDEX_FILE, BIN_INDEX_FILE, GENERATION_CONFIG, *TOKENIZER_NAMES)
    return name in names or CHAT_TEMPLATE.fullmatch(name) is not None


def read_aux_files(folder: Path) -> dict[str, bytes]:
    """Read a model's files besides its configuration and tensors, by path in its folder.

    Raises:
        CheckpointError: One is a link out of the folder, too large, or cannot be read; or a chat template has a name
            that a checkpoint cannot store.
    """
    names = (*TOKENIZER_NAMES, GENERATION_CONFIG, *_list_chat_templates(folder))
    found = {name: read_confined(folder, name, MAX_JSON_BYTES) for name in names}
    return {name: data for name, data in found.items() if data is not None}


def _list_chat_templates(folder: Path) -> list[str]:
    with translate_os_errors("reading", folder / CHAT_TEMPLATES):
        if not (folder / CHAT_TEMPLATES).is_dir():
            return []
        names = sorted(f"{CHAT_TEMPLATES}/{path.name}" for path in (folder / CHAT_TEMPLATES).glob("*.jinja"))
    for name in names:
        if not CHAT_TEMPLATE.fullmatch(name):
            raise CheckpointError(f"{folder / name}: rename it: letters, digits, '_', '.' and '-' name a chat template")
    return names


def read_stored_arrays(folder: Path) -> dict[str, dict[str, StoredArray]]:
    """Read the headers of a folder's tensor files: model.safetensors, pytorch_model.bin, or shards with their index.

    Returns:
        File → tensor → its array.

    Raises:
        CheckpointError: A file is missing, damaged or a link out of the folder, or index and files disagree.
    """
    for index, single in ((INDEX_FILE, SINGLE_FILE), (BIN_INDEX_FILE, BIN_FILE)):
        if (folder / index).exists():
            if (folder / single).exists() and set(read_weight_map(folder / index).values()) != {single}:
                raise CheckpointError(
                    f"{folder}: has {single}, which transformers reads, and {index}, which names other files; move "
                    "one of the two models away"
                )
            return _read_indexed_files(folder / index)
        if (folder / single).exists():
            return {single: read_tensor_file(folder, single)}
    raise CheckpointError(f"{folder}: has none of {', '.join(WEIGHT_FILES)}")


def read_tensor_file(folder: Path, file: str) -> dict[str, StoredArray]:
    """Read the header of a tensor file of a folder: tensor → its array."""
    path = resolve_confined(folder, file)
    if file.endswith(".safetensors"):
        return read_header(path)
    from lt_ckpt.torchfile.file import read_state_dict  # needs torch

    return read_state_dict(path)


def _read_indexed_files(source: Path) -> dict[str, dict[str, StoredArray]]:
    """Read the files of an index, and check that they and the index agree.

    The index may list a tied head that its file lacks, as transformers does; other tensors it may not.
    """
    names: dict[str, set[str]] = {}
    for tensor, file in read_weight_map(source).items():
        names.setdefault(check_name(file, source), set()).add(tensor)
    suffix = ".safetensors" if source.name == INDEX_FILE else ".bin"
    foreign = next((file for file in names if "/" in file or not file.endswith(suffix)), None)
    if foreign is not None:
        raise CheckpointError(f"{source}: {foreign!r} is not a {suffix} file of this folder")
    found = {file: read_tensor_file(source.parent, file) for file in sorted(names)}
    for file, arrays in found.items():
        differing = (names[file] ^ set(arrays)) - {TIED_HEAD}
        if differing:
            raise CheckpointError(
                f"{source.parent / file}: the index and the file disagree about tensor {min(differing)!r}"
            )
    return found
