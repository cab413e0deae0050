"""`lt train`: run, check, show, plan, watch, report, inspect, bench, tune, evaluate and sample.

Heavy imports are in the commands.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from lt_model.command_app import CommandApp, path_text

if TYPE_CHECKING:
    from lt_trainer.config.recipe import ResolvedRecipe

COMMAND_ENTRY_POINTS = "lt.commands.train"
"""Entry points that add commands to `lt train`; each names a typer app with one command."""


class TrainGroup(TyperGroup):
    """`lt train`: the commands below, and those of engines (entry points `lt.commands.train`)."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return our commands, then the added ones by name, without importing them."""
        return super().list_commands(ctx) + sorted(entry.name for entry in entry_points(group=COMMAND_ENTRY_POINTS))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return one of our commands, or import an added one."""
        own = super().get_command(ctx, cmd_name)
        added = (entry for entry in entry_points(group=COMMAND_ENTRY_POINTS) if entry.name == cmd_name)
        return own or next((get_command(entry.load()) for entry in added), None)


app = CommandApp(
    cls=TrainGroup,
    name="train",
    help="Train a recipe, show it, evaluate a trained model or sample from it.",
)

RecipeFile = Annotated[Path, typer.Argument(metavar="RUN.toml", help="Recipe.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=C", help="Override a field of the recipe; repeatable."),
]
Hyperparameters = Annotated[
    Path | None,
    typer.Option(help="JSON object of upper-case hyperparameters (SageMaker's hyperparameters.json)."),
]
StopAfterStep = Annotated[
    int, typer.Option(help="Stop after this step as on SIGTERM: save, exit with 75; 0 for never.", min=0)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Device = Annotated[str, typer.Option(help="Device: auto, cpu, cuda, cuda:N, mps.")]
Dtype = Annotated[
    str, typer.Option(help="Dtype: auto (bfloat16 where the device multiplies it), float32, bfloat16, float64.")
]


def echo(text: str) -> None:
    """Print text that quotes others' files: what would change a terminal is escaped."""
    from lt_data.display.terminal import echo as echo_escaped

    echo_escaped(text)


def _read(sets: list[str] | None, hyperparameters: Path | None) -> dict[str, Any]:
    """Return the arguments of `load` that these options stand for."""
    from lt_trainer.config.hyperparameters import read_hyperparameters

    values = read_hyperparameters(hyperparameters) if hyperparameters else None
    return {"overrides": sets or [], "hyperparameters": values}


def _load(recipe: Path, sets: list[str] | None, hyperparameters: Path | None) -> ResolvedRecipe:
    from lt_trainer.config.recipe import load

    return load(recipe, **_read(sets, hyperparameters))


@app.command()
def run(
    recipe: RecipeFile,
    sets: Overrides = None,
    hyperparameters: Hyperparameters = None,
    stop_after_step: StopAfterStep = 0,
) -> None:
    """Train, in one process or as one rank under torchrun; resume from the newest valid checkpoint.

    Exit codes: 0 all steps done, 75 stopped and saved (rerun to resume), 64 user error, 70 internal error.
    """
    from lt_trainer.resilience.stop_signals import process_stop_signals

    stop = process_stop_signals()
    from lt_trainer.engine import World
    from lt_trainer.training.loop import train
    from lt_trainer.training.run import open_run

    resolved = _load(recipe, sets, hyperparameters)
    with open_run(resolved, World.from_env(os.environ), stop=stop) as opened:
        code = train(opened, stop_after_step=stop_after_step)
    sys.exit(code)


@app.command()
def check(
    recipe: RecipeFile,
    sets: Overrides = None,
    hyperparameters: Hyperparameters = None,
) -> None:
    """Test a whole start without training: data, devices, one step, one save and restore.

    Writes only into a scratch folder beside run.dir and deletes it. In one process or as one rank under torchrun. Exit
    codes as for `run`.
    """
    from lt_trainer.engine import World
    from lt_trainer.training.check import check_run

    check_run(_load(recipe, sets, hyperparameters), World.from_env(os.environ))


@app.command()
def torchrun(
    recipe: RecipeFile,
    nproc_per_node: Annotated[int, typer.Option(help="Ranks on this machine.", min=1)],
    sets: Overrides = None,
    hyperparameters: Hyperparameters = None,
    check: Annotated[
        bool, typer.Option("--check", help="Run `lt train check` on all ranks instead of training.")
    ] = False,
    stop_after_step: StopAfterStep = 0,
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- OPTION...]", help="Options of torchrun, such as --nnodes=2; default --standalone."),
    ] = None,
) -> None:
    """Train on all ranks of this machine under torchrun, with the recipe's grace period."""
    from lt_trainer.cli.torchrun import run_torchrun

    arguments = ["check" if check else "run", str(recipe)]
    arguments += [text for value in sets or [] for text in ("--set", value)]
    arguments += ["--hyperparameters", str(hyperparameters)] if hyperparameters else []
    arguments += ["--stop-after-step", str(stop_after_step)] if stop_after_step and not check else []
    resolved = _load(recipe, sets, hyperparameters)  # report an invalid recipe once, not on every rank
    sys.exit(run_torchrun(resolved.recipe, nproc_per_node, options or [], arguments))


@app.command()
def show(
    recipe: RecipeFile,
    sets: Overrides = None,
    hyperparameters: Hyperparameters = None,
    as_json: AsJson = False,
) -> None:
    """Print the resolved recipe, each value with its origin."""
    from lt_trainer.config.recipe import to_toml

    resolved = _load(recipe, sets, hyperparameters)
    if as_json:
        values = {"recipe": resolved.to_dict(), "origins": dict(resolved.origins)}
        echo(json.dumps({**values, "unchecked": list(resolved.unchecked)}, indent=1))
        return
    echo(to_toml(resolved.recipe, resolved.origins).removesuffix("\n"))
    for section in resolved.unchecked:
        echo(f"# [{section}] is not checked: its engine is not installed here; training checks it")


@app.command()
def plan(
    recipe: RecipeFile,
    devices: Annotated[int, typer.Option(help="Devices per node.", min=1)],
    device: Annotated[str, typer.Option(help="Device: h100, h200, a100, l40s, trn1, ... (an unknown one lists all).")],
    nodes: Annotated[int, typer.Option(help="Nodes; 0 for parallel.n_nodes of the recipe.", min=0)] = 0,
    mfu: Annotated[
        float, typer.Option(help="Measured MFU, such as 0.42; 0 to assume one, which is printed.", min=0, max=1)
    ] = 0.0,
    sets: Overrides = None,
    hyperparameters: Hyperparameters = None,
    as_json: AsJson = False,
) -> None:
    """Print memory by part, time and energy of a run before it is started; needs no device and no torch.

    If the run does not fit, suggests the nearest layout that does. Exit codes: 0 fits, 1 does not fit, 64 user error.
    """
    from lt_trainer.config.recipe import complete
    from lt_trainer.planning.plan import plan_recipe

    fits, text, values = plan_recipe(
        complete(_load(recipe, sets, hyperparameters)),
        device=device,
        devices=devices,
        nodes=nodes or None,
        mfu=mfu or None,
    )
    echo(json.dumps(values, indent=1) if as_json else text)
    raise typer.Exit(0 if fits else 1)


@app.command()
def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory, of a running or finished run.")],
    interval: Annotated[float, typer.Option(help="Seconds between updates.", min=0.1)] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Show the current state and exit.")] = False,
) -> None:
    """Show a run live in the terminal, from its files; Ctrl-C ends the view, not the run."""
    from contextlib import suppress

    from lt_trainer.observability.watch import watch_run

    with suppress(KeyboardInterrupt):
        watch_run(run, interval_s=interval, once=once)


@app.command()
def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run directories; several are compared in the same figures.")
    ],
    out: Annotated[Path, typer.Option(help="HTML file to write.")] = Path("report.html"),
    png: Annotated[Path | None, typer.Option(help="Folder for the figures as PNG.", show_default=False)] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Overwrite existing files.")] = False,
) -> None:
    """Write a self-contained HTML report of runs: curves, data, model, machine, recipe, events."""
    from lt_trainer.observability.report import write_report

    for path in write_report(runs, out, png=png, overwrite=overwrite):
        echo(str(path))


@app.command()
def inspect(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")],
    step: Annotated[int, typer.Option(help="Step, from 1.")],
    store: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]FOLDER", help="Store that has moved; NAME in a mixture.", show_default=False),
    ] = None,
    row: Annotated[int | None, typer.Option(help="Only this row of the batch, from 0.", show_default=False)] = None,
    rows: Annotated[
        str | None, typer.Option(metavar="A:B", help="Only the rows A to B - 1.", show_default=False)
    ] = None,
    full_text: Annotated[bool, typer.Option("--full-text", help="Print the complete text.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the documents that a step read, and their sources."""
    from shutil import get_terminal_size

    from lt_data.display.inspection_text import parse_rows, row_lines
    from lt_trainer.observability.inspection import inspect_step

    pairs = [one.partition("=") if "=" in one else ("", "", one) for one in store or ()]
    stores = {name: path_text(folder) for name, _, folder in pairs}
    found = inspect_step(run, step, stores=stores, rows=parse_rows(row, rows))
    if as_json:
        echo(json.dumps(found.to_dict(), indent=2))
        return
    if step > found.last_recorded:
        echo(f"step {step} is not recorded (the last step is {found.last_recorded}); going on, the run would read:")
    last = found.position + found.batch_rows - 1
    echo(f"step {step}: positions {found.position} to {last}, over {found.dp_size} data-parallel rank(s)")
    for field, path in found.stores.items():
        echo(f"{field}: {path}")
    columns = get_terminal_size((120, 24)).columns
    for one in found.rows:
        origin = f"{one.origin}, " * bool(one.origin)
        header = f"row {one.index}: position {one.position}, {origin}epoch {one.epoch}, rank {one.rank}"
        echo("\n".join(["", *row_lines(one, header, columns=columns, full_text=full_text)]))


@app.command()
def bench(
    recipe: Annotated[Path | None, typer.Argument(metavar="[RUN.toml]", help="Recipe; its data is not read.")] = None,
    preset: Annotated[
        str, typer.Option(help="Preset instead of a recipe: one row per device, at most 4096 positions.")
    ] = "",
    steps: Annotated[int, typer.Option(help="Timed steps.", min=1)] = 20,
    warmup: Annotated[int, typer.Option(help="Steps before them, with the first one.", min=1)] = 3,
    sets: Overrides = None,
    hyperparameters: Hyperparameters = None,
) -> None:
    """Benchmark training steps on random ids: speed, MFU, HFU and memory as one JSON.

    In one process or as one rank under torchrun. Writes only the JSON.
    """
    from lt_trainer.training.benchmark import resolve_bench_recipe, run_benchmark

    resolved = resolve_bench_recipe(str(recipe) if recipe else None, preset, **_read(sets, hyperparameters))
    report = run_benchmark(resolved, steps=steps, warmup=warmup)
    if report is not None:
        echo(json.dumps(report, indent=1))


@app.command()
def tune(
    recipe: RecipeFile,
    nproc_per_node: Annotated[int, typer.Option(help="Ranks of a probe, on this machine.", min=1)] = 1,
    steps: Annotated[int, typer.Option(help="Timed steps of a probe.", min=1)] = 5,
    warmup: Annotated[int, typer.Option(help="Steps before them, with the first one.", min=1)] = 2,
    timeout: Annotated[float, typer.Option(help="Seconds after which a probe is ended.", min=1)] = 600.0,
    journal: Annotated[
        Path | None, typer.Option(help="File of results; default RUN.tune.jsonl.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="TOML file to write with the fastest setting.", show_default=False)
    ] = None,
    sets: Overrides = None,
    hyperparameters: Hyperparameters = None,
) -> None:
    """Find the fastest micro-batch, recomputation and compile choice of a recipe by short probes.

    Each probe is `lt train bench` in processes of its own; running out of memory is a result. Ctrl-C shows what was
    measured, and the same command goes on from the journal. The global batch stays the same.
    """
    import signal
    from functools import partial

    from lt_trainer.resilience.stop_signals import install_handlers
    from lt_trainer.training.benchmark import resolve_bench_recipe
    from lt_trainer.tuning.probe import run_probe
    from lt_trainer.tuning.tune import tune_recipe

    install_handlers(signal.default_int_handler)  # a scheduler's stop ends the probe and shows the results, too
    options = ["--steps", str(steps), "--warmup", str(warmup)]
    given = [str(recipe), *options, *(word for text in sets or [] for word in ("--set", text))]
    given += ["--hyperparameters", str(hyperparameters)] if hyperparameters else []
    tune_recipe(
        resolve_bench_recipe(str(recipe), "", **_read(sets, hyperparameters)),
        partial(run_probe, given, ranks=nproc_per_node, timeout_s=timeout),
        ranks=nproc_per_node,
        options=options,
        journal=journal or recipe.with_suffix(".tune.jsonl"),
        out=out,
        log=echo,
    )


@app.command()
def evaluate(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="Run directory (its newest checkpoint), checkpoint, or model of another format.",
        ),
    ],
    tasks: Annotated[
        str, typer.Option(help="Tasks of lm-evaluation-harness, separated by commas (lt-trainer[eval]).")
    ] = "",
    include_path: Annotated[Path | None, typer.Option(help="Folder of further task files.", show_default=False)] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(help="Examples before a question.", min=0, show_default=False)
    ] = None,
    limit: Annotated[int, typer.Option(help="Items of each task, the first ones; 0 for all.", min=0)] = 0,
    store: Annotated[
        list[Path] | None, typer.Option(help="Token store to compute the loss over; repeatable.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for results.jsonl; the same command goes on from it. Default: in the run directory, of a run.",
            show_default=False,
        ),
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    seq_len: Annotated[int, typer.Option(help="Positions per row; 0 for the model's context length.", min=0)] = 0,
    micro_batch_size: Annotated[int, typer.Option(help="Rows per forward pass.", min=1)] = 1,
) -> None:
    """Evaluate a model on one device: tasks, and the loss over stores by source and by length.

    Results are printed, and kept as JSON lines: of a run in evaluation/step-N-DTYPE of its directory, else in --out.
    """
    from lt_trainer.cli.evaluate import evaluate as run_evaluation

    run_evaluation(
        model,
        tasks=[name for name in tasks.split(",") if name],
        include_path=include_path,
        num_fewshot=num_fewshot,
        limit=limit,
        stores=store or [],
        device=device,
        dtype=dtype,
        seq_len=seq_len,
        micro_batch_size=micro_batch_size,
        out=out,
        echo=echo,
    )


@app.command()
def sample(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CKPT",
            help="Checkpoint, run directory (its newest checkpoint) or exported Hugging Face folder.",
        ),
    ],
    prompt: Annotated[str, typer.Argument(help="Text to continue.", show_default=False)] = "",
    max_new_tokens: Annotated[int, typer.Option(help="Maximum number of tokens to generate.", min=1)] = 100,
    temperature: Annotated[float, typer.Option(help="Temperature; 0 for the most likely token.", min=0.0)] = 0.8,
    top_k: Annotated[int, typer.Option(help="Sample from the k most likely tokens; 0 for all.", min=0)] = 50,
    top_p: Annotated[
        float,
        typer.Option(help="Sample from the most likely tokens with this total probability.", min=0.0, max=1.0),
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    samples: Annotated[int, typer.Option(help="Number of continuations.", min=1)] = 1,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Generate text from a trained model; ends at the model's context length at the latest."""
    from lt_data.display.terminal import escape_controls
    from lt_trainer.cli.sample import generate_text
    from lt_trainer.evaluation.local_model import load_model

    loaded = load_model(checkpoint, device=device, dtype=dtype)
    options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    for number in range(seed, seed + samples):
        text = prompt + generate_text(loaded, prompt, seed=number, **options)
        typer.echo(escape_controls(text) if sys.stdout.isatty() else text)
