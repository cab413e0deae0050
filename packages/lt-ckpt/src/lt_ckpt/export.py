"""Export of a checkpoint's weights as a Hugging Face folder that `transformers` loads.

Tensors go in model order into files of at most `max_shard_bytes`; each is read, cast if asked for, and written in
blocks of rows, so memory stays at a few blocks whatever the model's size, and each stored byte is read once. Everything
is written into a hidden sibling folder, put on the disk, and renamed, so the output is there complete or not at all.
Tensors of other names, dtypes that cannot be cast, or a missing tensor are errors before the first byte is written.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from lt_ckpt import files, strict_json
from lt_ckpt.checkpoint import Checkpoint
from lt_ckpt.dtypes import cast, item_bytes, long_name
from lt_ckpt.errors import CheckpointError, storage
from lt_ckpt.folders import new_token
from lt_ckpt.hf_folder import CONFIG, INDEX, SINGLE
from lt_ckpt.shards import row_blocks
from lt_ckpt.tensorfile import TensorSpec, TensorWriter, file_order
from lt_model import LlamaConfig, parameters

GENERATION = "generation_config.json"
BLOCK_ELEMENTS = 4 * 2**20
"""Elements that are read, cast and written in one go."""


@dataclass(frozen=True, kw_only=True)
class _Output:
    """What the folder will hold: small files by name, and tensor files by name with their tensors in order."""

    small: dict[str, bytes]
    shards: dict[str, dict[str, TensorSpec]]


def _token_id(name: str, tokenizer: Mapping[str, dict[str, Any]]) -> int | None:
    """Returns the id of a special token that the tokenizer's files name, for example `bos_token`; None without one."""
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        token = tokenizer.get(file, {}).get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            break
    else:
        return None
    table = tokenizer.get("tokenizer.json", {})
    for added in table.get("added_tokens") or ():
        if added.get("content") == text:
            return int(added["id"])
    found = ((table.get("model") or {}).get("vocab") or {}).get(text)
    if not isinstance(found, int):
        raise CheckpointError(f"the tokenizer's {name} is {text!r}, but its vocabulary has no such token")
    return found


def _shards(specs: Mapping[str, TensorSpec], limit: int) -> dict[str, dict[str, TensorSpec]]:
    """Cuts the tensors in order into files of at most `limit` bytes; a longer tensor has a file of its own."""
    groups: list[dict[str, TensorSpec]] = [{}]
    room = limit
    for name, spec in specs.items():
        if groups[-1] and spec.n_bytes > room:
            groups.append({})
            room = limit
        groups[-1][name] = spec
        room -= spec.n_bytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, start=1)}


def _plan(checkpoint: Checkpoint, dtype: str | None, max_shard_bytes: int) -> _Output:
    """Decides every file's name and content, apart from the tensors' bytes."""
    if not checkpoint.manifest.model:
        raise CheckpointError(f"{checkpoint.path}: names no model, so it cannot be exported")
    config = LlamaConfig.from_dict(checkpoint.manifest.model, source=f"{checkpoint.path}: model")
    stored = checkpoint.specs("weights")
    table = {parameter.name: parameter.shape for parameter in parameters(config)}
    checkpoint.require(
        {"weights": {name: TensorSpec(stored[name].dtype if name in stored else "F32", table[name]) for name in table}}
    )
    specs = {name: TensorSpec(dtype or stored[name].dtype, shape) for name, shape in table.items()}
    for name, spec in specs.items():
        cast(np.empty(0, np.uint8), stored[name].dtype, spec.dtype)  # refuses what cannot be cast
    kinds: dict[str, int] = {}
    for spec in specs.values():
        kinds[spec.dtype] = kinds.get(spec.dtype, 0) + spec.n_bytes
    tokenizer = checkpoint.tokenizer_files()
    parsed = {name: strict_json.loads(data, name) for name, data in tokenizer.items() if name.endswith(".json")}
    ids = {f"{kind}_token_id": _token_id(f"{kind}_token", parsed) for kind in ("bos", "eos", "pad")}
    model = config.to_hf(
        bos_token_id=ids["bos_token_id"],
        eos_token_id=ids["eos_token_id"],
        dtype=long_name(max(kinds, key=lambda kind: kinds[kind])),
    )
    shards = _shards(specs, max_shard_bytes)
    small = {
        **tokenizer,
        CONFIG: _pretty(model),
        GENERATION: _pretty({name: value for name, value in ids.items() if value is not None}),
    }
    if SINGLE not in shards:
        total = sum(spec.n_bytes for spec in specs.values())
        weight_map = {name: file for file, group in shards.items() for name in group}
        small[INDEX] = _pretty({"metadata": {"total_size": total}, "weight_map": weight_map})
    return _Output(small=small, shards=shards)


def _pretty(value: dict[str, Any]) -> bytes:
    return strict_json.dumps(value, "the configuration", indent=2)


def _blocks(checkpoint: Checkpoint, name: str, target: str, tick: "_Tick") -> Iterator[np.ndarray]:
    """Yields a tensor's bytes, block of rows after block of rows, cast to the target dtype."""
    source = checkpoint.dtype("weights", name)
    for offset, shape in row_blocks(checkpoint.global_shape("weights", name), BLOCK_ELEMENTS):
        yield cast(checkpoint.read("weights", name, offset=offset, shape=shape), source, target)
        tick(prod(shape) * item_bytes(target))


class _Tick:
    """Adds up the bytes written and tells the progress."""

    def __init__(self, total: int, progress: files.Progress | None) -> None:
        self.done, self.total, self.progress = 0, total, progress

    def __call__(self, n_bytes: int) -> None:
        self.done += n_bytes
        if self.progress is not None:
            self.progress(self.done, self.total, "bytes")


def _check_with_reference_reader(path: Path, specs: Mapping[str, TensorSpec]) -> None:
    """Opens a file that we wrote with the `safetensors` library, which reads its header, and compares what it sees."""
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as reader:
        slices = {name: reader.get_slice(name) for name in reader.keys()}  # noqa: SIM118 - no mapping, has only keys()
        seen = {name: TensorSpec(part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
    assert seen == dict(specs), f"{path}: safetensors reads other tensors than were written"


def export_hf(
    checkpoint: Checkpoint,
    out: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    max_shard_bytes: int = 5 * 10**9,
    progress: files.Progress | None = None,
) -> Path:
    """Writes the weights as a Hugging Face folder.

    The folder gets config.json, generation_config.json, model.safetensors or several files with their index, and the
    checkpoint's tokenizer files. A tied model has no lm_head.

    Args:
        checkpoint: What to export; the group `weights` must hold exactly the parameters of its model.
        out: Folder to make; one that is there must be empty.
        dtype: Safetensors code to cast to (F64, F32, F16, BF16; rounding to nearest even); None: as stored.
        max_shard_bytes: Most bytes of tensors per file.
        progress: Told the bytes written so far and in all.

    Returns:
        The folder.

    Raises:
        CheckpointError: `out` is not empty, the weights are not those of the model, or the disk fails.
        lt_model.ModelError: The manifest's model is no Llama that lt_model knows.
    """
    target = Path(os.path.abspath(out))
    if max_shard_bytes < 1:
        raise CheckpointError(f"max_shard_bytes must be at least 1, is {max_shard_bytes}")
    with storage("exporting", target):
        if os.path.lexists(target) and not (target.is_dir() and not any(target.iterdir())):
            raise CheckpointError(f"{target}: is there already and not an empty folder; choose another path")
    output = _plan(checkpoint, dtype, max_shard_bytes)
    tick = _Tick(sum(spec.n_bytes for group in output.shards.values() for spec in group.values()), progress)
    temporary = target.with_name(f".{target.name}.tmp-{new_token()}")
    made: list[Path] = []
    try:
        with storage("exporting", target):
            files.make_folders(target.parent)
            files.make_folder(temporary)
            for name, data in output.small.items():
                made += [temporary / f"{name}.tmp", temporary / name]
                files.write_file(temporary / name, data)
            for name, group in output.shards.items():
                made.append(temporary / name)
                with TensorWriter(temporary / name, group, {"format": "pt"}) as writer:
                    for key in file_order(group):
                        writer.write(key, _blocks(checkpoint, key, group[key].dtype, tick))
                _check_with_reference_reader(temporary / name, group)
            files.fsync_folder(temporary)
            files.rename(temporary, target)
            files.fsync_folder(target.parent)
    except BaseException:
        # Only what this call made is removed; the error itself goes on.
        with suppress(OSError):
            for path in made:
                path.unlink(missing_ok=True)
            temporary.rmdir()
        raise
    return target
