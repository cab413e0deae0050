"""Experts of gpt-oss: in its files a gate and an up alternate, and matrices are transposed.

We have the gates, ups and downs of a layer as [experts, out, in] each, and biases as [experts, out]. Its files have
[experts, in, out] with gates and ups in alternate columns of one tensor, and their biases likewise. No box of ours is a
box of theirs, so a layout is not enough: what is read is a strided slice, and what is written a tensor made of ours a
block at a time, under a name that begins with `JOINED`.

Cost: an expert's bytes are read once for its gate and once for its up; writing needs memory for twice a block.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np

from lt_ckpt.dtypes import item_bytes
from lt_ckpt.errors import CheckpointError
from lt_ckpt.laid_out_files import ReadBlock
from lt_ckpt.shards import Box, Ints
from lt_ckpt.source import TensorGroup, group_of
from lt_ckpt.stored_slices import StoredSlice, contiguous_strides
from lt_ckpt.tensorfile import TensorSpec
from lt_model import ModelConfig
from lt_model.families import FAMILIES

JOINED = "joined "
"""Begin of the name of a tensor that is made of ours; what follows is its name under ours."""

_PART = re.compile(r"(?<=\.experts\.)(gate|up|down)_proj(?=_bias|\.|$)")
_WHOLE = re.compile(r"(?<=\.experts\.)(gate_up|down)_proj(?=_bias|\.|$)")


def whole_keys(config: ModelConfig, keys: Collection[str]) -> dict[str, str]:
    """Return our tensors in a file, under the family's names, to the names in the file."""
    is_joined = FAMILIES[config.family].has_transposed_experts
    return {part: key for key in keys for part in (_parts(key) if is_joined else (key,))}


def split_group(config: ModelConfig, group: TensorGroup) -> TensorGroup:
    """Return the tensors of a file with those of experts apart, and as ours."""
    found: dict[str, tuple[TensorSpec, tuple[StoredSlice, ...]]] = {}
    for part, key in whole_keys(config, group.specs).items():
        spec, slices = group.specs[key], group.locations[key]
        if FAMILIES[config.family].has_transposed_experts and _WHOLE.search(key):
            place, step, item = _parts(key).index(part), len(_parts(key)), item_bytes(spec.dtype)
            slices = tuple(one for s in slices if 0 not in (one := _part_of(s, place, step, item)).shape)
            spec = replace(spec, shape=_swap((*spec.shape[:-1], len(range(place, spec.shape[-1], step)))))
        found[part] = spec, slices
    return group_of(found)


def join_specs(config: ModelConfig, specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Return the specs of a target's tensors with joined ones in place of experts, where the family has them.

    Raises:
        CheckpointError: Gates and ups are of two dtypes.
    """
    found: dict[str, TensorSpec] = {}
    for name, spec in specs.items():
        match = _PART.search(name) if FAMILIES[config.family].has_transposed_experts else None
        if match is None:
            found[name] = spec
        elif match[1] != "up":
            key = _PART.sub("gate_up_proj" if match[1] == "gate" else "down_proj", name)
            dtypes = {specs[part].dtype for part in _parts(key)}
            if len(dtypes) > 1:
                raise CheckpointError(f"{key}: its parts are {' and '.join(sorted(dtypes))}; cast them (--dtype)")
            *outer, columns = _swap(spec.shape)
            found[JOINED + key] = TensorSpec(spec.dtype, (*outer, columns * len(_parts(key))))
    return found


def join_blocks(read: ReadBlock) -> ReadBlock:
    """Return a function that reads joined tensors, in whole rows of theirs, by one that reads ours."""

    def read_joined(name: str, box: Box) -> np.ndarray:
        if not name.startswith(JOINED):
            return read(name, box)
        shape, parts = box[1], _parts(name.removeprefix(JOINED))
        own = box[0], _swap((*shape[:-1], shape[-1] // len(parts)))
        blocks = [read(part, own) for part in parts]
        out = np.empty(shape, blocks[0].dtype)
        for place, block in enumerate(blocks):
            out[..., place :: len(parts)] = block.swapaxes(1, 2) if block.ndim == 3 else block
        return out

    return read_joined


def _parts(key: str) -> tuple[str, ...]:
    match = _WHOLE.search(key)
    return tuple(_WHOLE.sub(f"{part}_proj", key) for part in match[1].split("_")) if match else (key,)


def _swap(numbers: Ints) -> Ints:
    """Return sizes, offsets or strides of theirs as ours, and the other way."""
    return (numbers[0], *reversed(numbers[1:]))


def _part_of(stored: StoredSlice, place: int, step: int, item: int) -> StoredSlice:
    """Return what a slice of a tensor of theirs has of every `step`-th column from `place` on, as a slice of ours."""
    strides, begin = stored.strides or contiguous_strides(stored.shape), stored.offset[-1]
    first, last = (-(-(column - place) // step) for column in (begin, begin + stored.shape[-1]))
    return replace(
        stored,
        byte_offset=stored.byte_offset + (place + step * first - begin) * strides[-1] * item,
        offset=_swap((*stored.offset[:-1], first)),
        shape=_swap((*stored.shape[:-1], last - first)),
        strides=_swap((*strides[:-1], step * strides[-1])),
    )
