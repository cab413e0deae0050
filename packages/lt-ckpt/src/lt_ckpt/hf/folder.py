"""Hugging Face Llama folder: config.json, safetensors by name, tokenizer files.

The index and every header are read and checked on opening (an index may not point out of the folder, name a tensor that
its file lacks, or omit one); tensor bytes are read only on demand, any slice of them.
Cost: open: the headers; read: the requested bytes.
"""

import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from lt_ckpt import files, strict_json
from lt_ckpt.checkpoint import read_slices
from lt_ckpt.confined_files import read_confined, resolve_confined
from lt_ckpt.errors import CheckpointError, translate_os_errors
from lt_ckpt.records import SliceRecord, TensorRecord
from lt_ckpt.shards import Ints, is_inside
from lt_ckpt.tensorfile import SafetensorsHeader, TensorSpec, read_header
from lt_model import LlamaConfig, config_from_hf

CONFIG, SINGLE_FILE, INDEX_FILE = "config.json", "model.safetensors", "model.safetensors.index.json"
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
    return strict_json.loads(raw, str(path))


def is_model_file(name: str) -> bool:
    """Return True for the small files of a model that opening it reads as wholes."""
    return name in (CONFIG, INDEX_FILE) or is_aux_file(name)


def is_aux_file(name: str) -> bool:
    """Return True for a model's files besides its configuration and tensors, by path in its folder."""
    return name in (*TOKENIZER_NAMES, GENERATION_CONFIG) or CHAT_TEMPLATE.fullmatch(name) is not None


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


class HFFolder:
    """Hugging Face Llama folder, open for reading (`HFFolder.open`).

    Attributes:
        path: The folder.
        config: The content of config.json.
        specs: Tensor name → dtype (safetensors code) and shape, in file order.
    """

    def __init__(self, path: Path, config: dict[str, Any], records: dict[str, TensorRecord]) -> None:
        self.path = path
        self.config = config
        self.specs: dict[str, TensorSpec] = {name: record.spec for name, record in records.items()}
        self._records = records

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "HFFolder":
        """Open a folder with config.json and model.safetensors, or shards with their index.

        Raises:
            CheckpointError: A file is missing, damaged or a link out of the folder, or index and files disagree.
        """
        folder = Path(path)
        config = read_json(folder / CONFIG)
        if (folder / INDEX_FILE).exists():
            headers = _read_indexed_headers(folder)
        elif (folder / SINGLE_FILE).exists():
            headers = [_read_header(folder, SINGLE_FILE)]
        else:
            raise CheckpointError(
                f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE} exists; is it a safetensors model folder?"
            )
        records: dict[str, TensorRecord] = {}
        for header in headers:
            for name, stored in header.tensors.items():
                whole = SliceRecord(
                    file=header.path.name,
                    key=name,
                    byte_offset=stored.byte_offset,
                    offset=(0,) * len(stored.shape),
                    shape=stored.shape,
                    xxh3_128="",
                )
                records[name] = TensorRecord(dtype=stored.dtype, shape=stored.shape, slices=(whole,))
        return cls(folder, config, records)

    def llama_config(self) -> LlamaConfig:
        """Return the model's configuration; raise a ModelError if it is not a supported Llama."""
        return config_from_hf(self.config, source=str(self.path / CONFIG))

    def names(self) -> tuple[str, ...]:
        """Return the names of all tensors."""
        return tuple(self.specs)

    def _record(self, name: str) -> TensorRecord:
        if name not in self._records:
            raise CheckpointError(f"{self.path}: no tensor {name!r}")
        return self._records[name]

    def dtype(self, name: str) -> str:
        """Return a tensor's dtype as a safetensors code."""
        return self._record(name).dtype

    def shape(self, name: str) -> Ints:
        """Return a tensor's shape."""
        return self._record(name).shape

    def read(self, name: str, *, offset: Ints | None = None, shape: Ints | None = None) -> np.ndarray:
        """Read a slice of a tensor; by default all of it.

        Returns:
            Its bytes: one-dimensional uint8, C order.

        Raises:
            CheckpointError: No such tensor, a slice outside of it, or a file that cannot be read.
        """
        record = self._record(name)
        start = (0,) * len(record.shape) if offset is None else offset
        size = tuple(n - o for n, o in zip(record.shape, start, strict=False)) if shape is None else shape
        if not is_inside((start, size), record.shape):
            raise CheckpointError(
                f"{self.path}: {name}: slice at {list(start)} of shape {list(size)} does not lie in it"
            )
        return read_slices(self.path, [(record, f"{self.path}: {name}", (start, size))])[0]

    def tensor_locations(self) -> dict[str, tuple[str, int]]:
        """Return tensor → its file and the byte at which it begins."""
        return {name: (record.slices[0].file, record.slices[0].byte_offset) for name, record in self._records.items()}

    def tokenizer_files(self) -> dict[str, bytes]:
        """Return the tokenizer's files by name; empty if there are none."""
        return {name: data for name, data in read_aux_files(self.path).items() if name != GENERATION_CONFIG}


def _read_header(folder: Path, file: str) -> SafetensorsHeader:
    resolve_confined(folder, file)
    return read_header(folder / file)


def _read_indexed_headers(folder: Path) -> list[SafetensorsHeader]:
    """Read the headers of the files in the index, and check that headers and index agree."""
    source = folder / INDEX_FILE
    weight_map = strict_json.get_field(read_json(source), "weight_map", dict, str(source))
    names: dict[str, set[str]] = {}
    for tensor, file in weight_map.items():
        is_plain_name = isinstance(file, str) and Path(file).name == file and file.isprintable()
        if not is_plain_name or not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{source}: {tensor!r} lies in {file!r}, which is not a safetensors file of this folder"
            )
        names.setdefault(file, set()).add(tensor)
    headers = [_read_header(folder, file) for file in sorted(names)]
    for header in headers:
        differing = names[header.path.name] ^ set(header.tensors)
        if differing:
            raise CheckpointError(f"{header.path}: the index and the file disagree about tensor {min(differing)!r}")
    return headers
