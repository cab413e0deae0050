"""Reading a Hugging Face Llama folder: config.json, safetensors by name, tokenizer files.

The index and every header are read and checked when the folder is opened (an index may not lead out of the folder, name
a tensor that its file lacks, or leave one out); tensor bytes are read only on demand, any slice of them.
Cost: open: the headers; read: the bytes wanted.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np

from lt_ckpt import files, strict_json
from lt_ckpt.checkpoint import read_slices
from lt_ckpt.errors import CheckpointError, storage
from lt_ckpt.records import Slice, TensorRecord
from lt_ckpt.shards import Ints, inside
from lt_ckpt.tensorfile import TensorFile, TensorSpec, read_header
from lt_model import LlamaConfig

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
TOKENIZER_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
)
GENERATION = "generation_config.json"
MAX_JSON_BYTES = 2**28


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file."""
    with storage("reading", path):
        return strict_json.loads(files.read_small(path, MAX_JSON_BYTES), str(path))


class HFFolder:
    """A Hugging Face Llama folder, open for reading. Make one with `HFFolder.open`.

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
        """Opens a folder that holds config.json and model.safetensors, or shards with their index.

        Raises:
            CheckpointError: A file is missing or damaged, or index and files disagree.
        """
        folder = Path(path)
        config = read_json(folder / CONFIG)
        if (folder / INDEX).exists():
            headers = _indexed(folder)
        elif (folder / SINGLE).exists():
            headers = [read_header(folder / SINGLE)]
        else:
            raise CheckpointError(f"{folder}: neither {SINGLE} nor {INDEX} is there; is it a safetensors model folder?")
        records: dict[str, TensorRecord] = {}
        for header in headers:
            for name, stored in header.tensors.items():
                whole = Slice(
                    file=header.path.name,
                    key=name,
                    begin=stored.begin,
                    offset=(0,) * len(stored.shape),
                    shape=stored.shape,
                    xxh3_128="",
                )
                records[name] = TensorRecord(dtype=stored.dtype, shape=stored.shape, slices=(whole,))
        return cls(folder, config, records)

    def llama_config(self) -> LlamaConfig:
        """Returns the model's configuration; a `lt_model.ModelError` when it is no Llama that lt_model knows."""
        return LlamaConfig.from_hf(self.config, source=str(self.path / CONFIG))

    def names(self) -> tuple[str, ...]:
        """Returns the names of all tensors."""
        return tuple(self.specs)

    def _record(self, name: str) -> TensorRecord:
        if name not in self._records:
            raise CheckpointError(f"{self.path}: no tensor {name!r}")
        return self._records[name]

    def dtype(self, name: str) -> str:
        """Returns a tensor's safetensors code."""
        return self._record(name).dtype

    def shape(self, name: str) -> Ints:
        """Returns a tensor's shape."""
        return self._record(name).shape

    def read(self, name: str, *, offset: Ints | None = None, shape: Ints | None = None) -> np.ndarray:
        """Reads a slice of a tensor, without arguments all of it.

        Returns:
            Its bytes: one-dimensional uint8, C order.

        Raises:
            CheckpointError: No such tensor, a slice outside of it, or a file that cannot be read.
        """
        record = self._record(name)
        start = (0,) * len(record.shape) if offset is None else offset
        size = tuple(n - o for n, o in zip(record.shape, start, strict=False)) if shape is None else shape
        if not inside((start, size), record.shape):
            raise CheckpointError(
                f"{self.path}: {name}: slice at {list(start)} of shape {list(size)} does not lie in it"
            )
        return read_slices(self.path, [(record, f"{self.path}: {name}", (start, size))])[0]

    def positions(self) -> dict[str, tuple[str, int]]:
        """Returns tensor → the file that holds it and the byte at which it begins there."""
        return {name: (record.slices[0].file, record.slices[0].begin) for name, record in self._records.items()}

    def small_files(self) -> dict[str, bytes]:
        """Returns what a copy of the model should carry besides: the tokenizer's files and generation_config.json."""
        found = self.tokenizer_files()
        if (self.path / GENERATION).is_file():
            with storage("reading", self.path / GENERATION):
                found[GENERATION] = files.read_small(self.path / GENERATION, MAX_JSON_BYTES)
        return found

    def tokenizer_files(self) -> dict[str, bytes]:
        """Returns the tokenizer's files by name; empty when there are none."""
        found: dict[str, bytes] = {}
        for name in TOKENIZER_NAMES:
            if (self.path / name).is_file():
                with storage("reading", self.path / name):
                    found[name] = files.read_small(self.path / name, MAX_JSON_BYTES)
        return found


def _indexed(folder: Path) -> list[TensorFile]:
    """Reads the headers of the files that the index names, and checks the two against each other."""
    source = folder / INDEX
    weight_map = strict_json.field(read_json(source), "weight_map", dict, str(source))
    names: dict[str, set[str]] = {}
    for tensor, file in weight_map.items():
        plain = isinstance(file, str) and Path(file).name == file and file.isprintable()
        if not plain or not file.endswith(".safetensors"):
            raise CheckpointError(f"{source}: {tensor!r} lies in {file!r}, which is no safetensors file of this folder")
        names.setdefault(file, set()).add(tensor)
    headers = [read_header(folder / file) for file in sorted(names)]
    for header in headers:
        lacking = names[header.path.name] ^ set(header.tensors)
        if lacking:
            raise CheckpointError(f"{header.path}: the index and the file disagree about tensor {min(lacking)!r}")
    return headers
