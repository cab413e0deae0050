"""Model section of the report: shape, parameters by kind, FLOPs per token, memory per device.

The shape is the newest checkpoint's, else the recipe's with the vocabulary of the data; the page names the source.
Cost: one pass over the parameter table; of a checkpoint, only the manifest is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from html import escape

from lt_ckpt import CheckpointError
from lt_ckpt.checkpoint import read_manifest
from lt_ckpt.discovery import list_steps
from lt_data import DataError
from lt_model import LlamaConfig, ModelError, n_parameters
from lt_model.costs import flops_per_token
from lt_model.params import param_specs
from lt_trainer.config.recipe import llama_config
from lt_trainer.constants import GIB, MIB
from lt_trainer.errors import RecipeError
from lt_trainer.observability.report.curves import format_short
from lt_trainer.observability.report.html_charts import bar_table, key_value_table, stat_tiles
from lt_trainer.observability.report.run_history import RunHistory
from lt_trainer.planning.layout import layout_from_recipe
from lt_trainer.planning.memory import PlannedMemory, plan_memory
from lt_trainer.planning.plan import vocab_size_and_source

PARAMETER_KINDS = {
    "embed_tokens": "input embedding",
    "lm_head": "output head",
    "q_proj": "attention, queries",
    "k_proj": "attention, keys",
    "v_proj": "attention, values",
    "o_proj": "attention, output",
    "gate_proj": "feed-forward, gate",
    "up_proj": "feed-forward, up",
    "down_proj": "feed-forward, down",
    "norm": "norms",
}
"""Displayed name by `ParamSpec.kind`."""


def model_section(run: RunHistory) -> str:
    """Return the model section as HTML."""
    try:
        config, source = model_config(run)
    except (RecipeError, ModelError, DataError, CheckpointError) as exc:
        return f"<p>Unknown model shape: {escape(str(exc))}</p>"
    seq_len = int(run.recipe_table.get("data", {}).get("seq_len", 0)) or config.max_position_embeddings
    total = n_parameters(config)
    tiles = stat_tiles(
        [
            (
                "parameters",
                format_short(total)
                if total < 10_000
                else f"{total / 1e6:,.2f}M"
                if total < 1e9
                else f"{total / 1e9:,.2f}B",
            ),
            ("layers", str(config.n_layers)),
            ("hidden size", f"{config.hidden_size:,}"),
            ("query and key/value heads", f"{config.n_heads}, {config.n_kv_heads}"),
            ("vocabulary", f"{config.vocab_size:,}"),
            ("FLOPs per token, full", f"{flops_per_token(config, seq_len, 'full'):.3g}"),
        ]
    )
    return (
        f"{tiles}<p class=note>Shape from {escape(source)}; rows of {seq_len:,} positions.</p><div class=two>"
        f"<section><h3>Parameters</h3>{bar_table(list(_parameters(config)))}</section>"
        f"<section><h3>Memory per device</h3>{_memory(run, config, seq_len)}</section></div>"
        f"<details><summary>Full shape</summary>{key_value_table(list(_shape(config)))}</details>"
    )


def model_config(run: RunHistory) -> tuple[LlamaConfig, str]:
    """Return the model shape and its source.

    Raises:
        RecipeError: unknown shape; CheckpointError, DataError, ModelError: damaged source.
    """
    steps = list_steps(run.path / "checkpoints") if (run.path / "checkpoints").is_dir() else []
    for _, folder in steps:  # newest first
        model = read_manifest(folder).model
        if model:
            return LlamaConfig.from_dict(model, str(folder)), f"the checkpoint {folder.name}"
    recipe = run.recipe()
    vocab_size, source = vocab_size_and_source(recipe)
    return llama_config(recipe, vocab_size), f"the recipe, its vocabulary from {source}"


def _parameters(config: LlamaConfig) -> Iterator[tuple[str, float, str]]:
    sums: dict[str, int] = {}
    for parameter in param_specs(config):
        sums[parameter.kind] = sums.get(parameter.kind, 0) + parameter.numel
    total = sum(sums.values())
    for kind, title in PARAMETER_KINDS.items():
        if kind in sums:
            yield title, float(sums[kind]), f"{format_short(sums[kind])} ({sums[kind] / total:.1%})"


def _shape(config: LlamaConfig) -> Iterator[tuple[str, str]]:
    for name, value in config.to_dict().items():
        yield name, str(value)
    for parameter in param_specs(config):
        if parameter.layer in (None, 0):
            count = "" if parameter.layer is None else f", {config.n_layers} layers"
            yield parameter.name.replace("layers.0.", "layers.*."), f"{' x '.join(map(str, parameter.shape))}{count}"


def _memory(run: RunHistory, config: LlamaConfig, seq_len: int) -> str:
    try:
        planned = _planned(run, config, seq_len)
    except RecipeError as exc:
        return f"<p>No plan: {escape(str(exc))}</p>{_measured(run)}"
    rows = [(name, n_bytes, _size(n_bytes)) for name, n_bytes in planned.parts.items() if n_bytes]
    return (
        f"<p>Planned peak ({escape(planned.peak_phase)}): {_size(planned.peak)}.</p>"
        f"{bar_table(rows, 'b')}{_measured(run)}"
    )


def _planned(run: RunHistory, config: LlamaConfig, seq_len: int) -> PlannedMemory:
    recipe = run.recipe()
    nodes, world = recipe.parallel.n_nodes, int(run.start_event.get("world", 1))
    layout = layout_from_recipe(recipe, devices=max(world // nodes, 1), nodes=nodes)
    options = run.recipe_table.get("engine", {}).get("gpu", {})
    if run.start_event.get("device") == "cpu" and options.get("dtype", "auto") == "auto":
        layout = replace(layout, compute_dtype="float32")
    return plan_memory(config, seq_len, layout)


def _measured(run: RunHistory) -> str:
    peaks = [float(record["memory_gib"]) for record in run.train if "memory_gib" in record]
    if not peaks:
        return ""
    quantity = (
        "resident set size of the process" if run.start_event.get("device") == "cpu" else "memory allocated by torch"
    )
    return f"<p>Measured peak: {max(peaks):.2f} GiB, {quantity}.</p>"


def _size(n_bytes: float) -> str:
    for unit, factor in (("GiB", GIB), ("MiB", MIB), ("KiB", 2**10)):
        if n_bytes >= factor:
            return f"{n_bytes / factor:.2f} {unit}"
    return f"{n_bytes:.0f} B"
