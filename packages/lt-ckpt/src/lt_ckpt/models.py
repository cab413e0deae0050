"""The model's side of every conversion: which tensors a Llama has, and its tied head.

A head that is tied to the embedding is a tensor of its own here: formats that store it twice have both, and a source
that lacks it finds it in the embedding's bytes.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

from lt_ckpt.convert import blocks, require_cast
from lt_ckpt.errors import CheckpointError
from lt_ckpt.shards import Ints
from lt_ckpt.source import Group, Reader, Source
from lt_ckpt.tensorfile import TensorSpec
from lt_model import LlamaConfig, parameters
from lt_model.params import Parameter

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
DROPPED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
"""Buffers that old files carry and that every reader computes anew."""


MAX_LAYERS = 100_000


def table_of(config: LlamaConfig) -> tuple[Parameter, ...]:
    """Returns the parameters of a model whose configuration may come from anywhere.

    Raises:
        CheckpointError: There would be so many that to list them would take all memory.
    """
    if config.n_layers > MAX_LAYERS:
        raise CheckpointError(f"the configuration has {config.n_layers} layers, which no Llama has; is it damaged?")
    return parameters(config)


def shapes_of(config: LlamaConfig) -> dict[str, Ints]:
    """Returns model tensor → shape in model order, the head always with them."""
    shapes: dict[str, Ints] = {parameter.name: parameter.shape for parameter in table_of(config)}
    shapes.setdefault(HEAD, shapes[EMBED])
    return shapes


def stored_shapes(config: LlamaConfig, head_is_stored: bool) -> dict[str, Ints]:
    """As `shapes_of`, without the head of a tied model whose files lack it."""
    shapes = shapes_of(config)
    if config.tie_word_embeddings and not head_is_stored:
        del shapes[HEAD]
    return shapes


def with_head(group: Group, config: LlamaConfig) -> Group:
    """Lets a tied head that is not stored be found where the embedding is."""
    if HEAD in group.specs or not config.tie_word_embeddings:
        return group
    return replace(
        group,
        specs={**group.specs, HEAD: group.specs[EMBED]},
        places={**group.places, HEAD: group.places[EMBED]},
    )


def target_specs(source: Source, shapes: Mapping[str, Ints], dtype: str | None) -> dict[str, TensorSpec]:
    """Returns what the tensors of a target will be.

    Args:
        source: What will be converted.
        shapes: The target's model tensors.
        dtype: Safetensors code to cast to; None: as stored.

    Raises:
        CheckpointError: The source lacks a tensor, or one cannot be cast.
    """
    specs: dict[str, TensorSpec] = {}
    for name, shape in shapes.items():
        if name not in source.weights.specs:
            raise CheckpointError(f"{source.path}: {name}: the source has no such tensor")
        stored = source.weights.specs[name].dtype
        require_cast(stored, dtype or stored)
        specs[name] = TensorSpec(dtype or stored, shape)
    return specs


def check_tied_head(source: Source) -> None:
    """Makes sure that a tied model's two copies of one matrix are equal before one of them is left out.

    Raises:
        CheckpointError: They differ, or have two dtypes.
    """
    group = source.weights
    if group.places[HEAD] == group.places[EMBED]:
        return
    if group.specs[HEAD] != group.specs[EMBED]:
        raise CheckpointError(
            f"{source.path}: tied, but {HEAD} is {group.specs[HEAD]} and {EMBED} {group.specs[EMBED]}"
        )
    with Reader(source.root) as reader:
        dtype = group.specs[HEAD].dtype
        pairs = zip(blocks(group, HEAD, dtype, reader), blocks(group, EMBED, dtype, reader), strict=True)
        for (box, head), (_, embed) in pairs:
            if (head != embed).any():
                raise CheckpointError(
                    f"{source.path}: tie_word_embeddings is true, but {HEAD} and {EMBED} differ (rows from {box[0][0]} "
                    "on); set it to false in the configuration to keep both"
                )
