"""Commands of `lt model`: show a model's shape and costs, list the presets. No torch, no numpy."""

import json
import os
from typing import Annotated

import typer

from lt_model.command_app import CommandApp, path_text

app = CommandApp(name="model", help="Model shapes: sizes, parameters, FLOPs per token, memory.")

_MAX_DEFAULT_SEQ_LEN = 4096


@app.command()
def show(
    model: Annotated[
        str,
        typer.Argument(metavar="PRESET|CONFIG", help="A preset, a config.json, or its folder.", parser=path_text),
    ],
    seq_len: Annotated[int, typer.Option(help="Tokens per row. 0: the model's length, at most 4096.")] = 0,
    micro_batch_size: Annotated[int, typer.Option(help="Rows per forward pass.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show a model's shape, parameters, FLOPs per token in both conventions, and memory by part."""
    from lt_model.describe import describe_model, format_description
    from lt_model.hf import read_config
    from lt_model.presets import PRESETS, preset

    # Anything but a path is a preset name, so that a typo gets the list of presets.
    config = read_config(model) if model not in PRESETS and _is_path(model) else preset(model)
    seq_len = seq_len or min(config.max_position_embeddings, _MAX_DEFAULT_SEQ_LEN)
    if as_json:
        typer.echo(json.dumps(describe_model(config, seq_len=seq_len, micro_batch_size=micro_batch_size), indent=2))
    else:
        typer.echo(format_description(config, seq_len=seq_len, micro_batch_size=micro_batch_size))


def _is_path(text: str) -> bool:
    """Return True for a path of something, or one that may not be looked at (reading says why)."""
    try:
        os.stat(text)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError:
        return True
    return True


@app.command("list")
def list_presets() -> None:
    """List the presets with family and sizes."""
    from lt_model.costs import n_parameters
    from lt_model.presets import PRESETS

    names = ("n_layers", "hidden_size", "intermediate_size", "n_heads", "n_kv_heads", "vocab_size")
    row = "{:<18} {:<12} {:>15} {:>9} {:>12} {:>18} {:>8} {:>11} {:>11} {:>8}"
    typer.echo(row.format("preset", "family", "parameters", *names, "context"))
    for name, config in PRESETS.items():
        sizes = [getattr(config, field) for field in (*names, "max_position_embeddings")]
        typer.echo(row.format(name, config.family, f"{n_parameters(config):,}", *sizes))
