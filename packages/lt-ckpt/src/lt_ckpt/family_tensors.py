"""Tensors of a family's files: its own names, and several of our tensors in one.

Our tensors have one name each in all families (`lt_model.param_specs`). Files of a family have its own, by the row of
`lt_model.families`: most are ours, Phi-3 has query, key and value one below the other in one tensor, GPT-NeoX head by
head; experts, which we have stacked, are a tensor each, and in transformers' modules one for gates and ups. All are
boxes of ours, so that reading, writing and checking follow from layouts (`layout.py`); but for `joined_experts`.

Pure. Cost: one object per tensor, where heads alternate one per head.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Literal

from lt_ckpt.joined_experts import JOINED, split_group
from lt_ckpt.layout import FileLayout, TensorLayout, TensorRegion, shard_box, stack_rows, whole_tensor
from lt_ckpt.llama_tensors import HEAD, add_tied_head, stored_shapes
from lt_ckpt.shards import Ints
from lt_ckpt.source import TensorGroup, build_tensor_group, check_names, group_of_arrays
from lt_ckpt.tensorfile import StoredArray
from lt_model import ModelConfig
from lt_model.families import FAMILIES

IGNORED_BUFFERS = re.compile(r"(^|\.)(rotary_emb\.inv_freq|attention\.(masked_)?bias)$")
"""Buffers in old files that every reader recomputes."""

Experts = Literal["each", "pairs", "stacked"]
"""A tensor for each expert, as files have; stacked, gates above ups, as transformers' modules; stacked, as ours."""

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def is_extra_layer(name: str, config: ModelConfig) -> bool:
    """Return whether a tensor of a file is of a layer beyond the model's, which predicts further tokens (MTP)."""
    match = _LAYER.match(name)
    return FAMILIES[config.family].has_extra_layers and match is not None and int(match[1]) >= config.n_layers


def family_key(name: str, config: ModelConfig) -> str:
    """Return the family's name of one of our tensors, where it is not a part of another."""
    for ours, theirs in FAMILIES[config.family].renames:
        name = name.replace(ours, theirs)
    return name


def family_tensors(
    config: ModelConfig,
    shapes: Mapping[str, Ints],
    rename: Callable[[str], str] | None = None,
    experts: Experts = "each",
) -> dict[str, TensorLayout]:
    """Return a family's tensors by their names.

    Args:
        config: The model.
        shapes: Our tensors, and joined ones.
        rename: Returns the name of one of our tensors; by default as `family_key`.
        experts: How they are stored.
    """
    rename = rename or partial(family_key, config=config)
    fused = {part: (key, *how) for key, how in FAMILIES[config.family].fused.items() for part in how[0]}
    found: dict[str, TensorLayout] = {}
    for name, shape in shapes.items():
        layer = match[0] if (match := _LAYER.match(name)) else ""
        part, _, end = name.removeprefix(layer).rpartition(".")
        if name.startswith(JOINED):
            key = rename(name.removeprefix(JOINED))
            found[key] = whole_tensor(name, shape, key)
            continue
        if len(shape) == 3 and experts == "pairs" and end != "down_proj":
            if end == "gate_proj":
                pair = rename(f"{layer}{part}.gate_up_proj")
                found[pair] = _stack_pairs(pair, (name, f"{layer}{part}.up_proj"), shape)
            continue
        if len(shape) == 3 and experts == "each":
            for expert in range(shape[0]):
                key = rename(f"{layer}{part}.{expert}.{end}.weight")
                one = stack_rows(key, [(name, shard_box(shape, 0, expert, shape[0], name))])
                found[key] = replace(one, file_shape=shape[1:])
            continue
        if not layer or part not in fused:
            found[rename(name)] = whole_tensor(name, shape, rename(name))
            continue
        stem, parts, order = fused[part]
        key, members = rename(f"{layer}{stem}.{end}"), [f"{layer}{member}.{end}" for member in parts]
        n_heads = config.n_heads if order == "heads" else 1
        boxes = [(m, shard_box(shapes[m], 0, head, n_heads, m)) for head in range(n_heads) for m in members]
        found[key] = stack_rows(key, boxes)
    return found


def _stack_pairs(key: str, names: tuple[str, str], shape: Ints) -> TensorLayout:
    """Return the layout of two stacks of matrices of which each expert has both, one below the other."""
    n_experts, rows, columns = shape
    regions = (
        TensorRegion(name=name, offset=(0, 0, 0), shape=shape, stored_offset=(0, place * rows, 0))
        for place, name in enumerate(names)
    )
    return TensorLayout(key=key, shape=(n_experts, 2 * rows, columns), regions=tuple(regions))


def module_key(name: str, config: ModelConfig) -> str:
    """Return the name of a tensor in transformers' module of the family, where the head is called so in all."""
    is_ours = name == HEAD or FAMILIES[config.family].has_our_names_in_modules
    return name if is_ours else family_key(name, config)


def find_family_tensors(
    config: ModelConfig,
    keys: Collection[str],
    where: str,
    rename: Callable[[str], str] | None = None,
    experts: Experts = "each",
) -> tuple[dict[str, TensorLayout], dict[str, Ints]]:
    """Return the family's tensors among stored ones, by their names, and the shapes of ours in them.

    A tied head may be missing; any head, and pairs of experts, may have the name of transformers' modules.

    Raises:
        CheckpointError: Names the tensors that are missing and those that are not the model's.
    """
    has_pairs = any(key.endswith(".experts.gate_up_proj") for key in keys)
    in_modules = has_pairs or (HEAD in keys and not FAMILIES[config.family].has_our_names_in_modules)
    rename = rename or partial(module_key if in_modules else family_key, config=config)
    shapes = stored_shapes(config, rename(HEAD) in keys)
    kind: Experts = "stacked" if FAMILIES[config.family].has_transposed_experts else "pairs" if has_pairs else experts
    found = family_tensors(config, shapes, rename, kind)
    check_names(found, keys, where)
    return found, shapes


def view_group(group: TensorGroup, tensors: Mapping[str, TensorLayout]) -> TensorGroup:
    """Return stored tensors in the dimensions of their layouts: an expert's as a stack of one."""
    specs, locations = dict(group.specs), dict(group.locations)
    for key, spec in group.specs.items():
        if spec.shape == tensors[key].file_shape != ():
            specs[key] = replace(spec, shape=tensors[key].shape)
            locations[key] = tuple(
                replace(s, offset=(0, *s.offset), shape=(1, *s.shape), strides=s.strides and (0, *s.strides))
                for s in group.locations[key]
            )
    return replace(group, specs=specs, locations=locations)


def build_family_group(config: ModelConfig, stored: Mapping[str, Mapping[str, StoredArray]], where: str) -> TensorGroup:
    """Assemble a model from files with its family's tensors.

    Args:
        config: The model.
        stored: File → its tensors.
        where: The source, for messages.

    Raises:
        CheckpointError: The tensors are not those of the model.
    """
    files = {
        file: {
            name: array
            for name, array in arrays.items()
            if not IGNORED_BUFFERS.search(name) and not is_extra_layer(name, config)
        }
        for file, arrays in sorted(stored.items())
    }
    groups = {file: split_group(config, group_of_arrays(file, arrays)) for file, arrays in files.items()}
    tensors, shapes = find_family_tensors(config, [key for group in groups.values() for key in group.specs], where)
    layout = tuple(FileLayout(path=file, tensors=tuple(tensors[key] for key in g.specs)) for file, g in groups.items())
    views = {file: view_group(group, tensors) for file, group in groups.items()}
    return add_tied_head(build_tensor_group(layout, views, shapes, where), config)
