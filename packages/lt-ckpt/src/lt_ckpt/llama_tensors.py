"""Llama tensors on the model side of every conversion: names, shapes, and the tied head.

A head tied to the embedding is a tensor of its own here: formats that store it twice have both, and a source that lacks
it finds it in the embedding's bytes.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from lt_ckpt.dtypes import check_castable, item_bytes
from lt_ckpt.errors import CheckpointError
from lt_ckpt.shards import Ints, split_rows
from lt_ckpt.source import Source, TensorGroup, check_names
from lt_ckpt.tensorfile import TensorSpec
from lt_model import ModelConfig
from lt_model import param_specs as model_param_specs
from lt_model.params import ParamSpec

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
MASTER_WEIGHTS = "master"
"""Group of the fp32 master weights."""

BLOCK_BYTES = 4 * 2**20
MAX_LAYERS = 100_000


def param_specs(config: ModelConfig) -> tuple[ParamSpec, ...]:
    """Return the parameters of a model whose configuration is untrusted.

    Raises:
        CheckpointError: Too many layers to list in memory.
    """
    if config.n_layers > MAX_LAYERS:
        raise CheckpointError(f"the configuration has {config.n_layers} layers, which no model has; is it damaged?")
    return model_param_specs(config)


def tensor_shapes(config: ModelConfig) -> dict[str, Ints]:
    """Return model tensor → shape in model order, always with the head."""
    shapes: dict[str, Ints] = {parameter.name: parameter.shape for parameter in param_specs(config)}
    shapes.setdefault(HEAD, shapes[EMBED])
    return shapes


def stored_shapes(config: ModelConfig, head_is_stored: bool) -> dict[str, Ints]:
    """Return `tensor_shapes`, without the head of a tied model whose files lack it."""
    shapes = tensor_shapes(config)
    if config.tie_word_embeddings and not head_is_stored:
        del shapes[HEAD]
    return shapes


def add_tied_head(group: TensorGroup, config: ModelConfig) -> TensorGroup:
    """Map a tied head that is not stored to the embedding's location."""
    if HEAD in group.specs or not config.tie_word_embeddings:
        return group
    return replace(
        group,
        specs={**group.specs, HEAD: group.specs[EMBED]},
        locations={**group.locations, HEAD: group.locations[EMBED]},
    )


def select_group(source: Source, group: str) -> Source:
    """Return a source whose weights are the tensors of another group, for example the fp32 master weights.

    Raises:
        CheckpointError: There is no such group.
    """
    if group == "weights":
        return source
    if group not in source.groups:
        raise CheckpointError(f"{source.path}: has no group {group!r}; it has {', '.join(source.groups)}")
    weights = add_tied_head(source.groups[group], source.model)
    return replace(source, groups={"weights": weights}, optimizer=None)


def cast_dtypes(specs: Mapping[str, TensorSpec], config: ModelConfig, dtype: str | None) -> dict[str, str]:
    """Return the dtype of each tensor after a cast; what is not trained stays in F32 or wider.

    Raises:
        CheckpointError: A tensor cannot be cast.
    """
    found = {name: dtype or spec.dtype for name, spec in specs.items()}
    for row in param_specs(config):
        if row.name in specs and not row.is_trained:
            found[row.name] = "F64" if specs[row.name].dtype == "F64" else "F32"
    for name, target in found.items():
        check_castable(specs[name].dtype, target)
    return found


def target_specs(source: Source, shapes: Mapping[str, Ints], dtype: str | None) -> dict[str, TensorSpec]:
    """Return the specs of a target's tensors.

    Args:
        source: What will be converted.
        shapes: The target's model tensors.
        dtype: Safetensors code to cast to; None: as stored.

    Raises:
        CheckpointError: The source lacks a tensor, or one cannot be cast.
    """
    check_names(shapes, [name for name in source.weights.specs if name in shapes], str(source.path))
    dtypes = cast_dtypes({name: source.weights.specs[name] for name in shapes}, source.model, dtype)
    return {name: TensorSpec(dtypes[name], shape) for name, shape in shapes.items()}


def check_tied_head(source: Source) -> None:
    """Check that a tied model's head and embedding are equal before one of them is dropped.

    Raises:
        CheckpointError: They differ, or have different dtypes.
    """
    group = source.weights
    if group.locations[HEAD] == group.locations[EMBED]:
        return
    if group.specs[HEAD] != group.specs[EMBED]:
        raise CheckpointError(
            f"{source.path}: tied, but {HEAD} is {group.specs[HEAD]} and {EMBED} {group.specs[EMBED]}"
        )
    spec = group.specs[HEAD]
    for box in split_rows(spec.shape, BLOCK_BYTES // item_bytes(spec.dtype)):
        if not np.array_equal(source.read(HEAD, box), source.read(EMBED, box)):
            raise CheckpointError(
                f"{source.path}: tie_word_embeddings is true, but {HEAD} and {EMBED} differ (rows from {box[0][0]} on);"
                " set it to false in the configuration to keep both"
            )
