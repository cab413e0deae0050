"""Fixtures: a small state to save, a fast folder, and the file system calls of a save under control."""

import errno
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lt_ckpt import Checkpoint, CheckpointMetadata, Shard, begin_save, commit_save, write_rank_files
from lt_ckpt.dtypes import cast
from lt_ckpt.formats import ConvertOptions, convert_checkpoint, open_source
from lt_ckpt.nxd.options import NxdOptions
from lt_ckpt.records import OptimizerRecord
from lt_ckpt.tensorfile import TensorSpec, write_safetensors
from lt_model import ModelConfig, config_to_hf, param_specs

OPTIMIZER = OptimizerRecord(name="sgd", slots=("exp_avg",))
DTYPES = {"F32": "<f4", "F64": "<f8", "BF16": "<u2", "I64": "<i8", "U8": "u1"}


def toy_state(seed: int) -> dict[tuple[str, str], tuple[str, np.ndarray]]:
    """(group, name) → (dtype code, array): matrices, a vector, a 0-dim tensor, an empty one, integers and bf16."""
    rng = np.random.default_rng(seed)
    return {
        ("weights", "a.weight"): ("F32", rng.standard_normal((6, 5)).astype("<f4")),
        ("weights", "b.weight"): ("BF16", rng.integers(0, 2**16, (4, 7), dtype=np.uint16)),
        ("weights", "norm"): ("F32", rng.standard_normal(3).astype("<f4")),
        ("exp_avg", "a.weight"): ("F64", rng.standard_normal((6, 5))),
        ("other", "scale"): ("F32", rng.standard_normal(()).astype("<f4").reshape(())),
        ("other", "counter"): ("I64", np.array(2**40 + seed, "<i8")),
        ("other", "empty"): ("F32", np.zeros((0, 3), "<f4")),
        ("rng", "bytes"): ("U8", rng.integers(0, 256, 11, dtype=np.uint8)),
    }


def as_bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def toy_shards(state: Mapping[tuple[str, str], tuple[str, np.ndarray]], rank: int, world: int) -> list[Shard]:
    """Rows dealt out evenly and unevenly over the ranks; what has no rows belongs to rank 0."""
    shards: list[Shard] = []
    for (group, name), (dtype, array) in state.items():
        if array.ndim == 0 and rank > 0:
            continue
        rows = np.array_split(np.arange(len(array)), world)[rank] if array.ndim else []
        start = int(rows[0]) if len(rows) else 0
        part = array[start : start + len(rows)] if array.ndim else array
        shards.append(
            Shard(
                group=group,
                name=name,
                dtype=dtype,
                global_shape=array.shape,
                offset=(start, 0, 0)[: array.ndim],
                shape=part.shape,
                data=as_bytes(part),
            )
        )
    return shards


def toy_save(root: Path, step: int, *, world: int = 2, seed: int | None = None, **more: object) -> Path:
    state = toy_state(step if seed is None else seed)
    tmp = begin_save(root, step=step, world_size=world)
    for rank in range(world):
        write_rank_files(tmp, rank=rank, shards=toy_shards(state, rank, world))
    meta = CheckpointMetadata(
        step=step,
        optimizer=OPTIMIZER,
        scalars={"lr": 0.1},
        tokenizer_files={"tokenizer.json": b"{}"},
        data={"row": step * 8},
    )
    return commit_save(tmp, world_size=world, metadata=meta, **more)  # pyright: ignore[reportArgumentType]


def toy_check(checkpoint: Checkpoint, seed: int | None = None) -> None:
    """Every tensor equals what was saved, bit for bit."""
    state = toy_state(checkpoint.step if seed is None else seed)
    assert {(group, name) for group in checkpoint.groups for name in checkpoint.names(group)} == set(state)
    for (group, name), (dtype, array) in state.items():
        assert checkpoint.specs(group)[name] == TensorSpec(dtype, array.shape)
        assert checkpoint.read(group, name).tobytes() == array.tobytes()


@pytest.fixture(scope="session")
def toy() -> SimpleNamespace:
    return SimpleNamespace(state=toy_state, shards=toy_shards, save=toy_save, check=toy_check, as_bytes=as_bytes)


def toy_config(**changes: object) -> ModelConfig:
    """A model with everything that can go wrong: fewer key/value heads, a remainder of layers, an odd width."""
    shape = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "n_heads": 4, "n_kv_heads": 2, "n_layers": 5}
    return ModelConfig(**(shape | changes))  # type: ignore[arg-type]


def toy_model(folder: Path, *, dtype: str = "BF16", seed: int = 0, **changes: object) -> Path:
    """A Hugging Face folder of random bits that are finite numbers, made without torch."""
    config = toy_config(**changes)
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    specs = {p.name: TensorSpec(dtype, p.shape) for p in param_specs(config)}

    def read(name: str) -> np.ndarray:
        return cast(rng.standard_normal(specs[name].shape).astype("<f4").reshape(-1).view(np.uint8), "F32", dtype)

    write_safetensors(folder / "model.safetensors", specs, {"format": "pt"}, read)
    values = config_to_hf(config, bos_token_id=None, eos_token_id=None, dtype="bfloat16")
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return folder


GROUPED = {"tp": 4, "kv_size_multiplier": 2, "pp": 2}
OUTPUTS: dict[str, dict[str, Any]] = {
    "hf": {"format": "hf"},
    "hf in shards": {"format": "hf", "max_shard_bytes": 1500},
    "lt": {"format": "lt"},
    "dcp": {"format": "dcp", "max_shard_bytes": 3000},
    "pt": {"format": "pt"},
    "nxd": {"nxd": {"tp": 2, "pp": 2}},
    "nxd v1": {"nxd": {"tp": 2, "layout": "v1"}},
    "nxd gqa": {"nxd": {**GROUPED, "qkv": "gqa", "tag": "step_3"}},
    "nxd in chunks": {"nxd": {"tp": 2, "pp": 2, "virtual_pp": 2, "qkv": "gqa_fused"}},
    "nxd xser": {"nxd": {**GROUPED, "qkv": "gqa_fused", "xser": True, "tag": "step_3"}},
    "nxd xser v1": {"nxd": {"tp": 2, "pp": 3, "xser": True, "layout": "v1"}},
}
"""Every output format and kind of a conversion of `toy_model`: name → its options."""


def toy_output(source: Path, out: Path, name: str) -> Path:
    """Converts a model; for `pt` the path gets a suffix. Those that do not say what the model is need its config."""
    options = dict(OUTPUTS[name])
    cut = options.pop("nxd", None)
    if cut is not None:
        options |= {"format": "nxd", "nxd": NxdOptions(**cut)}
    target = out.with_suffix(".pt") if options["format"] == "pt" else out
    convert_checkpoint(open_source(source), target, ConvertOptions(**options))
    return target


@pytest.fixture(scope="session")
def models() -> SimpleNamespace:
    return SimpleNamespace(config=toy_config, make=toy_model, outputs=OUTPUTS, output=toy_output)


@pytest.fixture(scope="session")
def memory() -> Iterator[Path]:
    """A folder in memory where there is one, for tests that save hundreds of times."""
    shared = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="lt-ckpt-", dir=shared if os.access(shared, os.W_OK) else None))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def fast_path(memory: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=memory))


class FileSystemCalls:
    """Every os call of a save, or of all threads that touch a folder: recorded in order, one failing if asked for."""

    NAMES = ("open", "write", "pwrite", "fsync", "rename", "mkdir", "close", "preadv", "unlink", "rmdir")

    def __init__(self) -> None:
        self.log: list[tuple[str, str]] = []
        self.folder: Path | None = None
        self.fail_at: int | tuple[str, int] = -1
        """Index of the call, or of it among those of a name."""
        self.failed_at = ""
        self.error = errno.ENOSPC
        self.short_writes = False
        self._paths: dict[int, str] = {}
        self._real: dict[str, Callable[..., object]] = {}
        self._lock = threading.RLock()

    def count(self, name: str) -> int:
        return sum(call == name for call, _ in self.log)

    def _is_counted(self, name: str, what: str, args: tuple[Any, ...]) -> bool:
        is_look = name == "open" and not args[1] & (os.O_WRONLY | os.O_DIRECTORY)
        return self.folder is None or (not is_look and Path(what).is_relative_to(self.folder))

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            first = args[0]
            what = self._paths.get(first, "?") if isinstance(first, int) else os.fspath(first)
            if self._is_counted(name, what, args):
                fails = self.fail_at in (len(self.log), (name, self.count(name)))
                self.log.append((name, what))
                if fails:
                    self.failed_at = what
                    if name == "close":
                        self._real["close"](first)  # a failing close frees the descriptor all the same
                    raise OSError(self.error, os.strerror(self.error))
            if name in ("write", "pwrite") and self.short_writes and len(args[1]) > 1:
                args = (first, memoryview(args[1])[: len(args[1]) // 2], *args[2:])
            result: Any = self._real[name](*args, **kwargs)
            if name == "open":
                self._paths[result] = what
            return result

    @contextmanager
    def recording(self, monkeypatch: pytest.MonkeyPatch, **settings: object) -> Iterator["FileSystemCalls"]:
        self.log = []
        self._real = {name: getattr(os, name) for name in self.NAMES}
        for key, value in settings.items():
            setattr(self, key, value)
        with monkeypatch.context() as patch:
            for name in self.NAMES:
                patch.setattr(os, name, lambda *args, _name=name, **kwargs: self._call(_name, *args, **kwargs))
            yield self


@pytest.fixture
def calls() -> FileSystemCalls:
    return FileSystemCalls()
