"""What was trained, for the page: shape, where the parameters are, what a token costs, what a device holds.

The shape is the newest checkpoint's, else the recipe's with the vocabulary of the data, and the page says which.
Cost: the table of parameters; of a checkpoint only its manifest is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from html import escape

from lt_ckpt import CheckpointError
from lt_ckpt.checkpoint import read_manifest
from lt_ckpt.discover import list_steps
from lt_data import DataError
from lt_model import LlamaConfig, ModelError, n_parameters
from lt_model.costs import flops_per_token
from lt_model.params import parameters
from lt_trainer.errors import RecipeError
from lt_trainer.planning.layout import of
from lt_trainer.planning.memory import PlannedMemory, planned_memory
from lt_trainer.planning.plan import vocabulary
from lt_trainer.recipe import llama_config
from lt_trainer.report.curves import short
from lt_trainer.report.drawing import bars, facts, tiles
from lt_trainer.report.reading import History

GIB = 2**30
PARTS = {
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
"""Kinds of parameters as the table of them has it, and how they are called."""


def model_part(run: History) -> str:
    """The section about the model, as HTML."""
    try:
        config, source = model_of(run)
    except (RecipeError, ModelError, DataError, CheckpointError) as exc:
        return f"<p>The shape of the model is not known here: {escape(str(exc))}</p>"
    seq_len = int(run.tables.get("data", {}).get("seq_len", 0)) or config.max_position_embeddings
    total = n_parameters(config)
    head = tiles(
        [
            (
                "parameters",
                short(total) if total < 10_000 else f"{total / 1e6:,.2f}M" if total < 1e9 else f"{total / 1e9:,.2f}B",
            ),
            ("layers", str(config.n_layers)),
            ("width", f"{config.hidden_size:,}"),
            ("heads, of these key/value", f"{config.n_heads}, {config.n_kv_heads}"),
            ("vocabulary", f"{config.vocab_size:,}"),
            ("FLOPs per token, full", f"{flops_per_token(config, seq_len, 'full'):.3g}"),
        ]
    )
    return (
        f"{head}<p class=note>Shape from {escape(source)}; rows of {seq_len:,} positions.</p><div class=two>"
        f"<section><h3>Where the parameters are</h3>{bars(list(_parameters(config)))}</section>"
        f"<section><h3>Memory of a device</h3>{_memory(run, config, seq_len)}</section></div>"
        f"<details><summary>All of the shape</summary>{facts(list(_shape(config)))}</details>"
    )


def model_of(run: History) -> tuple[LlamaConfig, str]:
    """The shape, and where it was found.

    Raises:
        RecipeError: nothing tells it; CheckpointError, DataError, ModelError: what tells it is damaged.
    """
    found = list_steps(run.path / "checkpoints") if (run.path / "checkpoints").is_dir() else []
    for _, folder in found:  # the newest first
        model = read_manifest(folder).model
        if model:
            return LlamaConfig.from_dict(model, str(folder)), f"the checkpoint {folder.name}"
    recipe = run.recipe()
    vocab_size, source = vocabulary(recipe)
    return llama_config(recipe, vocab_size), f"the recipe, its vocabulary from {source}"


def _parameters(config: LlamaConfig) -> Iterator[tuple[str, float, str]]:
    sums: dict[str, int] = {}
    for parameter in parameters(config):
        sums[parameter.kind] = sums.get(parameter.kind, 0) + parameter.size
    total = sum(sums.values())
    for kind, title in PARTS.items():
        if kind in sums:
            yield title, float(sums[kind]), f"{short(sums[kind])} ({sums[kind] / total:.1%})"


def _shape(config: LlamaConfig) -> Iterator[tuple[str, str]]:
    for name, value in config.to_dict().items():
        yield name, str(value)
    for parameter in parameters(config):
        if parameter.layer in (None, 0):
            times = "" if parameter.layer is None else f", {config.n_layers} times"
            yield parameter.name.replace("layers.0.", "layers.*."), f"{' x '.join(map(str, parameter.shape))}{times}"


def _memory(run: History, config: LlamaConfig, seq_len: int) -> str:
    try:
        planned = _planned(run, config, seq_len)
    except RecipeError as exc:
        return f"<p>No plan of it: {escape(str(exc))}</p>{_measured(run)}"
    rows = [(name, n_bytes, _size(n_bytes)) for name, n_bytes in planned.parts.items() if n_bytes]
    return (
        f"<p>Planned, at the fullest moment of a step ({escape(planned.moment)}): {_size(planned.peak)}.</p>"
        f"{bars(rows, 'b')}{_measured(run)}"
    )


def _planned(run: History, config: LlamaConfig, seq_len: int) -> PlannedMemory:
    recipe = run.recipe()
    nodes, world = recipe.parallel.n_nodes, int(run.start.get("world", 1))
    layout = of(recipe, devices=max(world // nodes, 1), nodes=nodes)
    options = run.tables.get("engine", {}).get("gpu", {})
    if run.start.get("device") == "cpu" and options.get("dtype", "auto") == "auto":
        layout = replace(layout, compute="float32")
    return planned_memory(config, seq_len, layout)


def _measured(run: History) -> str:
    peaks = [float(record["memory_gib"]) for record in run.train if "memory_gib" in record]
    if not peaks:
        return ""
    what = (
        "the largest resident size of its process, interpreter and libraries included"
        if run.start.get("device") == "cpu"
        else "the most that torch had allocated"
    )
    return f"<p>Measured: {max(peaks):.2f} GiB, {what}.</p>"


def _size(n_bytes: float) -> str:
    for unit, factor in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if n_bytes >= factor:
            return f"{n_bytes / factor:.2f} {unit}"
    return f"{n_bytes:.0f} B"
