"""What a finished quickstart tells: tables for a person, summary.json for programs, and the same steps as commands."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from lt_trainer.quickstart.baselines import Comparison
from lt_trainer.quickstart.settings import Folder, Settings
from lt_trainer.quickstart.training import Resume

if TYPE_CHECKING:
    from lt_trainer.quickstart.logits import LogitCheck


def show_resume(console: Console, resume: Resume, seconds: float) -> None:
    """The shadow steps of the process that stopped beside the same steps of the one that went on."""
    table = Table(title=f"Stop after step {resume.step}, resume in a new process: the same losses, bit for bit")
    for heading in ("step", "before the stop (shadow)", "after the resume", ""):
        table.add_column(heading, justify="right")
    for i, (shadow, resumed) in enumerate(zip(resume.shadow, resume.resumed, strict=True), start=resume.step + 1):
        table.add_row(str(i), repr(shadow), repr(resumed), "equal" if shadow == resumed else "DIFFERENT")
    console.print(table)
    console.print(f"training took {seconds:.0f} s in this start")


def show_logits(console: Console, check: LogitCheck) -> None:
    """The one line that the logit check comes to."""
    console.print(
        f"exported model in transformers, float32, {check.tokens} tokens: largest logit difference "
        f"{check.max_difference:.3g} "
        f"= {check.max_difference / check.scale:.2g} of the largest logit {check.scale:.3g} "
        f"(allowed: {check.tolerance:g})"
    )


def show_comparison(console: Console, comparison: Comparison) -> None:
    """The model among the baselines, best first."""
    table = Table(
        title=f"Validation loss over {comparison.validation_tokens:,} tokens; "
        f"the model was trained on {comparison.seen_tokens:,}"
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
    """Prompts and what the model makes of them."""
    for prompt, text in samples:
        console.rule("sample", align="left")
        console.print(prompt, style="bold", end="", markup=False, highlight=False)
        console.print(text, markup=False, highlight=False)
    console.rule()


def summary(console: Console, folder: Folder, numbers: Mapping[str, Any], seconds: Mapping[str, float]) -> None:
    """The table at the end."""
    table = Table(title="Summary", show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right")
    for name, value in numbers.items():
        table.add_row(
            name, value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
        )
    for name, value in seconds.items():
        table.add_row(f"time: {name}", f"{value:.1f} s")
    console.print(table)


def show_commands(console: Console, folder: Folder, settings: Settings) -> None:
    """Each step by hand."""
    console.print("The same by hand:")
    for command in commands(folder, settings):
        console.print("  " + shlex.join(command), markup=False, highlight=False, soft_wrap=True)


def commands(folder: Folder, settings: Settings) -> list[list[str]]:
    """The commands that do what the quickstart did, one step each."""
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
    settings: Settings,
    resume: Resume,
    logits: LogitCheck,
    comparison: Comparison,
    numbers: Mapping[str, Any],
    seconds: Mapping[str, float],
) -> None:
    """All numbers as JSON."""
    content = {
        "settings": asdict(settings),
        "resume": asdict(resume) | {"equal": resume.equal},
        "logits": asdict(logits) | {"equal": logits.equal},
        "comparison": asdict(comparison) | {"beaten": comparison.beaten},
        "numbers": dict(numbers),
        "seconds": dict(seconds),
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
