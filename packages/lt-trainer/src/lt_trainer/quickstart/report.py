"""Output of the quickstart: tables, summary.json, and the equivalent commands."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lt_data.display.terminal import escape_controls
from lt_trainer.files import write_atomic
from lt_trainer.quickstart.baselines import BaselineComparison
from lt_trainer.quickstart.settings import QuickstartFolder, QuickstartSettings
from lt_trainer.quickstart.training import ResumeCheck

if TYPE_CHECKING:
    from lt_trainer.quickstart.logits import LogitCheck


def show_resume(console: Console, resume: ResumeCheck, seconds: float) -> None:
    """Print the losses of the resume check and of the same steps after the resume."""
    table = Table(title=f"Losses after a stop at step {resume.step} and a resume in a new process, bit for bit")
    for heading in ("step", "without the stop", "after the resume", ""):
        table.add_column(heading, justify="right")
    pairs = zip(resume.expected, resume.resumed, strict=True)
    for step, (expected, resumed) in enumerate(pairs, start=resume.step + 1):
        table.add_row(str(step), repr(expected), repr(resumed), "equal" if expected == resumed else "DIFFERENT")
    console.print(table)
    console.print(f"training took {seconds:.0f} s in this process")


def show_logits(console: Console, check: LogitCheck) -> None:
    """Print the result of the logit check."""
    console.print(
        f"exported model in transformers, float32, {check.tokens} tokens: largest logit difference "
        f"{check.max_difference:.3g} = {check.max_difference / check.scale:.2g} of the largest logit {check.scale:.3g} "
        f"(tolerance {check.tolerance:g})"
    )


def show_comparison(console: Console, comparison: BaselineComparison) -> None:
    """Print the losses of model and baselines, best first."""
    table = Table(
        title=f"Validation loss over {comparison.validation_tokens:,} tokens; "
        f"the model was trained on {comparison.seen_tokens:,} tokens"
    )
    table.add_column("predictor")
    for heading in ("nats/token", "bits/byte", "add-k"):
        table.add_column(heading, justify="right")
    for score in sorted((comparison.model, *comparison.baselines), key=lambda score: score.nats_per_token):
        style = "bold" if score is comparison.model else None
        table.add_row(
            score.name,
            f"{score.nats_per_token:.4f}",
            f"{score.bits_per_byte:.4f}",
            f"{score.k:g}" if score.k is not None else "",
            style=style,
        )
    console.print(table)


def show_samples(console: Console, samples: Sequence[tuple[str, str]]) -> None:
    """Print prompts and their completions."""
    for prompt, text in samples:
        console.rule("sample", align="left")
        console.print(escape_controls(prompt), style="bold", end="", markup=False, highlight=False)
        console.print(escape_controls(text), markup=False, highlight=False)
    console.rule()


def show_summary(console: Console, numbers: Mapping[str, Any], seconds: Mapping[str, float]) -> None:
    """Print the final numbers and stage times."""
    table = Table(title="Summary", show_header=False)
    table.add_column("name")
    table.add_column("value", justify="right")
    for name, value in numbers.items():
        table.add_row(
            name,
            Text(escape_controls(value, keep=""))
            if isinstance(value, str)
            else f"{value:,}"
            if isinstance(value, int)
            else f"{value:.4g}",
        )
    for name, value in seconds.items():
        table.add_row(f"time: {name}", f"{value:.1f} s")
    console.print(table)


def show_commands(console: Console, folder: QuickstartFolder, settings: QuickstartSettings) -> None:
    """Print the equivalent commands."""
    console.print("The same as single commands:")
    for command in commands(folder, settings):
        console.print("  " + escape_controls(shlex.join(command)), markup=False, highlight=False, soft_wrap=True)


def commands(folder: QuickstartFolder, settings: QuickstartSettings) -> list[list[str]]:
    """Return the equivalent commands, one per stage."""
    size = str(settings.seq_len)
    stores = ((folder.corpus_train, folder.train), (folder.corpus_validation, folder.validation))
    return [
        [
            "lt",
            "data",
            "train-tokenizer",
            str(folder.corpus_train),
            "--vocab-size",
            str(settings.vocab_size),
            "--out",
            str(folder.tokenizer),
        ],
        *(
            ["lt", "data", "prepare", str(corpus), "--tokenizer", str(folder.tokenizer), "--out", str(store)]
            for corpus, store in stores
        ),
        *(["lt", "data", "pack", str(store), "--seq-len", size, "--mode", "bfd"] for _, store in stores),
        ["lt", "data", "stats", str(folder.train)],
        ["lt", "model", "show", settings.preset, "--seq-len", size],
        ["lt", "train", "show", str(folder.recipe)],
        ["lt", "train", "run", str(folder.recipe)],
        ["lt", "ckpt", "verify", str(folder.run)],
        ["lt", "ckpt", "export", str(folder.run), "--out", str(folder.model)],
        ["lt", "train", "sample", str(folder.model), "--prompt", "def "],
        ["lt", "train", "report", str(folder.run), "--out", str(folder.report)],
    ]


def write_summary(
    path: Path,
    *,
    settings: QuickstartSettings,
    resume: ResumeCheck,
    logits: LogitCheck,
    comparison: BaselineComparison,
    numbers: Mapping[str, Any],
    seconds: Mapping[str, float],
) -> None:
    """Write all numbers as JSON."""
    content = {
        "settings": asdict(settings),
        "resume": asdict(resume) | {"is_equal": resume.is_equal},
        "logits": asdict(logits) | {"is_equal": logits.is_equal},
        "comparison": asdict(comparison) | {"beats_baseline": comparison.beats_baseline},
        "numbers": dict(numbers),
        "seconds": dict(seconds),
    }
    write_atomic(path, json.dumps(content, indent=1) + "\n")
