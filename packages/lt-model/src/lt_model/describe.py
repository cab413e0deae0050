"""Shape and costs of a model as text or plain values: the output of `lt-model show`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby
from typing import Any

from lt_model.config import ModelConfig
from lt_model.costs import flops_per_token, memory_bytes, n_compute_parameters, n_parameters
from lt_model.params import ParamSpec, param_specs

ALIGNMENT = 64  # matrix sizes that are multiples of this run at full speed on tensor cores and on AMX


def misaligned_sizes(config: ModelConfig) -> dict[str, int]:
    """Return the matrix sizes that are not a multiple of `ALIGNMENT`, by field."""
    sizes = {name: getattr(config, name) for name in ("vocab_size", "hidden_size", "intermediate_size", "expert_size")}
    if not config.has_dense_layers:
        del sizes["intermediate_size"]
    return {name: size for name, size in sizes.items() if size % ALIGNMENT}


def alignment_warnings(config: ModelConfig) -> list[str]:
    """Return a warning per matrix size that is not a multiple of `ALIGNMENT`, with the nearest ones."""
    return [
        f"{name} = {size} is not a multiple of {ALIGNMENT}: its matrix products run slower "
        + (
            f"(Decoder(pad_vocab_to_multiple_of={ALIGNMENT}) rounds them up, with the same results)"
            if name == "vocab_size"
            else f"({nearest_aligned(size)} would be aligned)"
        )
        for name, size in misaligned_sizes(config).items()
    ]


def describe_model(config: ModelConfig, *, seq_len: int, micro_batch_size: int = 1) -> dict[str, Any]:
    """Return shape, parameters, costs and warnings as plain values (JSON-ready).

    Args:
        config: the model.
        seq_len: tokens per row, for FLOPs and memory.
        micro_batch_size: rows per forward pass, for memory.

    Raises:
        ModelError: `seq_len` or `micro_batch_size` below 1.
    """
    memory = memory_bytes(config, micro_batch_size=micro_batch_size, seq_len=seq_len)
    return {
        "config": config.to_dict(),
        "head_dim": config.head_width,
        "parameters": n_parameters(config),
        "compute_parameters": n_compute_parameters(config),
        "seq_len": seq_len,
        "micro_batch_size": micro_batch_size,
        "flops_per_token": {
            "full": flops_per_token(config, seq_len, "full"),
            "causal": flops_per_token(config, seq_len, "causal"),
        },
        "memory_bytes": {**memory, "total": sum(memory.values())},
        "warnings": alignment_warnings(config),
    }


def format_description(config: ModelConfig, *, seq_len: int, micro_batch_size: int = 1) -> str:
    """Return the values of `describe_model` and the shapes of all tensors as text."""
    return "\n".join(_iter_lines(config, describe_model(config, seq_len=seq_len, micro_batch_size=micro_batch_size)))


def _iter_lines(config: ModelConfig, facts: dict[str, Any]) -> Iterator[str]:
    shown = {"family": config.family, **facts["config"], "head_dim": config.head_width}
    if "layers" in shown:
        kinds = [", ".join(name for name, is_so in asdict(kind).items() if is_so) or "plain" for kind in config.layers]
        shown["layers"] = "; ".join(f"{len([*run])} x {kind}" for kind, run in groupby(kinds))
        shown["layers"] += ", repeated" if len(config.layers) < config.n_layers else ""
    for name, value in shown.items():
        yield f"{name:<24} {value}"
    yield ""
    yield from _iter_shape_lines(param_specs(config))
    yield ""
    yield f"parameters               {facts['parameters']:,}"
    yield f"  multiplied per token   {facts['compute_parameters']:,} (without the input embedding, with the head)"
    for convention, note in (("full", "whole attention square"), ("causal", "half of it")):
        flops = facts["flops_per_token"][convention]
        title = f"FLOPs/token, {convention}"
        yield f"{title:<24} {flops:,} (training, seq_len {facts['seq_len']}, {note})"
    yield f"memory, fp32 AdamW       {_format_bytes(facts['memory_bytes']['total'])} without activations of the blocks:"
    for part, n_bytes in facts["memory_bytes"].items():
        if part != "total":
            note = f" (micro_batch_size {facts['micro_batch_size']}, if materialized)" if part == "logits" else ""
            yield f"  {part:<22} {_format_bytes(n_bytes)}{note}"
    for warning in facts["warnings"]:
        yield f"warning: {warning}"


def _iter_shape_lines(table: tuple[ParamSpec, ...]) -> Iterator[str]:
    """List each tensor once, those of blocks with the number of layers that have it."""
    names = [(spec.name.replace(f"layers.{spec.layer}.", "layers.*."), spec.shape) for spec in table]
    for (name, shape), count in Counter(names).items():
        yield f"{name:<48} {list(shape)!s:<16}{f' x {count}' if '*' in name else ''}".rstrip()


def nearest_aligned(size: int) -> str:
    """Return the multiples of `ALIGNMENT` below and above a size."""
    below = size - size % ALIGNMENT
    return f"{below} or {below + ALIGNMENT}" if below else str(ALIGNMENT)


def _format_bytes(n_bytes: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n_bytes >= factor:
            return f"{n_bytes / factor:.2f} {unit}"
    return f"{n_bytes} B"
