"""Bytes of activations per token of one block, saved and at the peaks of its backward pass.

Under context parallelism a device has the activations of its own positions only, but attention's keys and values are
those that these positions see of all devices (`SELECTED_KEYS`). They are counted for rows of one document, the most;
short documents need hardly more than a device's own.
"""

from __future__ import annotations

from typing import Any

from lt_model import ModelConfig
from lt_model.activation_memory import activation_bytes_per_token, block_backward_bytes_per_token
from lt_trainer.planning.layout import PlannedLayout

OF_ROUTED_POSITIONS = {"router", "choice of experts", "outputs of experts", "shared output"}
"""What is saved for the positions that a device routes: with expert parallelism, those of one tensor parallel rank."""
ORDER_BYTES = 16
"""Bytes of a received row's place among its expert's rows, and back."""
SELECTED_KEYS = 0.5
"""Keys beyond all of the cp devices' equal shares that a device selects at most: it has a head and a tail chunk of each
row, and keys that both see are selected twice. Attention in blocks (of capped scores, or where values have another
width than keys) takes each key once."""


def activations_per_token(config: ModelConfig, layout: PlannedLayout, layer: int) -> float:
    """Return activation bytes per token of a block; "memory_budget" interpolates between "full" and "none"."""

    def saved(mode: Any) -> float:
        return _saved_per_token(config, layout, mode, layer) + (
            _foreign_keys_per_token(config, layout) if mode == "none" else 0.0
        )

    if layout.activation_checkpointing == "memory_budget":
        return saved("full") + layout.activation_memory_budget * (saved("none") - saved("full"))
    return saved(layout.activation_checkpointing)


def block_backward_per_token(config: ModelConfig, layout: PlannedLayout) -> float:
    """Return bytes per token of a block's backward; "memory_budget" may recompute as much as "full"."""
    mode = "full" if layout.activation_checkpointing == "memory_budget" else layout.activation_checkpointing
    n_bytes = block_backward_bytes_per_token(config, "none" if layout.ep > 1 else mode, **_sharding(layout))
    if layout.ep > 1:
        row, inner = config.hidden_size, config.expert_size * layout.expert_imbalance
        rows = config.experts_per_token / layout.tp
        n_bytes += rows * 3 * (inner - config.expert_size) * layout.element_bytes
        n_bytes -= (config.experts_per_token - rows) * row * (4 + layout.element_bytes)
        all_bytes, saved = (_saved_per_token(config, layout, one) for one in ("none", mode))
        n_bytes += all_bytes - min(saved, all_bytes)
    return n_bytes if mode == "none" else n_bytes + _foreign_keys_per_token(config, layout)


def attention_backward_per_token(config: ModelConfig, layout: PlannedLayout) -> float:
    """Return bytes per token at the end of a block's backward, where its attention's is.

    The stream and its gradient, queries and output with theirs, or the gradients of keys and values. Under context
    parallelism also what norms of queries and keys keep; selected keys and values with their gradients, which flash
    kernels compute for every query head; and the buffer in which they are added up.
    """
    width = config.hidden_size * layout.element_bytes
    queries = config.n_heads * config.head_width * layout.element_bytes / layout.tp
    outputs = config.n_heads * config.head_value_width * layout.element_bytes / layout.tp
    own = 2 * width + 2 * queries + 2 * outputs
    if layout.cp == 1:
        return own
    saved = activation_bytes_per_token(config, "none", **_sharding(layout))
    kv, selected = _kv_per_token(config, layout), _selected_shares(config, layout)
    per_head = (queries + outputs) * selected if config.n_kv_heads < config.n_heads else 0.0
    own += saved.get("norms of queries and keys", 0.0)
    return own + 2 * kv * selected + max(per_head, kv * layout.cp)


def _saved_per_token(config: ModelConfig, layout: PlannedLayout, mode: Any, layer: int | None = None) -> float:
    """Return saved bytes per token; with expert parallelism a device routes its own positions, others' rows arrive."""
    parts = dict(activation_bytes_per_token(config, mode, **_sharding(layout), layer=layer))
    if layout.ep == 1 or (layer is not None and not config.layer(layer).experts):
        return sum(parts.values())
    row, inner = config.hidden_size * layout.element_bytes, config.expert_size * layout.element_bytes
    rows = config.experts_per_token / layout.tp
    received = rows * layout.expert_imbalance
    for name in parts.keys() & OF_ROUTED_POSITIONS:
        parts[name] /= layout.tp
    if mode == "selective":  # what arrives, one product of the inner width, and what returns
        parts["experts"] = received * (row + inner) + rows * row
    elif mode == "none":
        parts["rows of experts"] = received * (row + ORDER_BYTES)
        for name in parts.keys() & {"gate", "up", "activation", "product"}:
            parts[name] += (received - rows) * inner
    return sum(parts.values())


def _sharding(layout: PlannedLayout) -> dict[str, Any]:
    return {name: getattr(layout, name) for name in ("element_bytes", "tp", "sequence_parallel")}


def _kv_per_token(config: ModelConfig, layout: PlannedLayout) -> float:
    """Return bytes of the keys and values of a token in one block."""
    widths = config.head_width + config.head_value_width
    return config.n_kv_heads * widths * layout.element_bytes / layout.tp


def _selected_shares(config: ModelConfig, layout: PlannedLayout) -> float:
    """Return how many devices' shares of the keys a device selects at most."""
    in_blocks = config.attention_softcap > 0 or config.head_value_width != config.head_width
    return layout.cp if in_blocks else layout.cp + SELECTED_KEYS


def _foreign_keys_per_token(config: ModelConfig, layout: PlannedLayout) -> float:
    """Return bytes of selected keys and values per token of this device, beyond those saved without cp.

    Of latent attention's keys the parts without rotation, which lie beside the values, are saved without cp alone.
    """
    if layout.cp == 1:
        return 0.0
    nope = config.n_heads * config.nope_width * layout.element_bytes / layout.tp
    return (_selected_shares(config, layout) - 1) * _kv_per_token(config, layout) - nope
