"""Stages of the quickstart in order."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from lt_data import TokenStore
from lt_data.display.progress_bars import progress_bar
from lt_data.display.terminal import escape_controls
from lt_model import PRESETS, ModelError, n_parameters, preset
from lt_trainer.observability.report import write_report
from lt_trainer.quickstart import report
from lt_trainer.quickstart.baselines import BaselineComparison, compare_with_baselines
from lt_trainer.quickstart.corpus import write_corpus
from lt_trainer.quickstart.settings import QuickstartError, QuickstartFolder, QuickstartSettings
from lt_trainer.quickstart.stages import PackedStore, export_model, make_pack, make_store, make_tokenizer, write_recipe
from lt_trainer.quickstart.training import ResumeCheck, last_metrics, losses, peak_source, train, validation_loss

if TYPE_CHECKING:
    from lt_trainer.quickstart.logits import LogitCheck

PROMPTS = ("def ", "class ", "import ", "    return ")


class StageTimer:
    """Seconds per stage in this process."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the block as stage `name`."""
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start


def main(*, out: Path, source: str, preset: str, steps: int, overwrite: bool) -> None:
    """Run or continue a quickstart.

    Raises:
        QuickstartError: invalid settings, a stage failed, or a result check failed.
    """
    console, timer = Console(), StageTimer()
    settings = _settings(source, preset, steps)
    folder = QuickstartFolder(out)
    if folder.claim(settings, overwrite=overwrite):
        text = f"{out} has a quickstart with these settings; continuing it (--overwrite starts over)"
        console.print(escape_controls(text), markup=False)
    train_packed, validation_packed = _data(console, timer, folder, settings)
    resume = _training(console, timer, folder, settings, train_packed)
    comparison, logits = _checks(console, timer, folder, settings, train_packed, validation_packed)
    with timer.stage("sample"):
        report.show_samples(console, _samples(folder))
    numbers = _numbers(settings, train_packed, comparison, folder)
    report.show_summary(console, numbers, timer.seconds)
    report.write_summary(
        folder.summary,
        settings=settings,
        resume=resume,
        logits=logits,
        comparison=comparison,
        numbers=numbers,
        seconds=timer.seconds,
    )
    write_report([folder.run], folder.report, overwrite=True)
    console.print(
        escape_controls(f"report of the run, to open in a browser: {folder.report}"), markup=False, soft_wrap=True
    )
    report.show_commands(console, folder, settings)
    check_results(resume, logits.is_equal, comparison)


def _settings(source: str, name: str, steps: int) -> QuickstartSettings:
    if name not in PRESETS:
        raise ModelError(f"--preset = {name!r}: unknown preset; the presets are {', '.join(PRESETS)}")
    interpreter = "" if source else f"{platform.python_implementation()} {platform.python_version()}"
    source = os.path.realpath(source) if source and "://" not in source else source
    settings = QuickstartSettings(source=source, interpreter=interpreter, preset=name)
    return QuickstartSettings(source=source, interpreter=interpreter, preset=name, steps=steps or settings.steps)


def _data(
    console: Console, timer: StageTimer, folder: QuickstartFolder, settings: QuickstartSettings
) -> tuple[PackedStore, PackedStore]:
    """Run stages 1 to 3: corpus, tokenizer, token stores, packs."""
    if not (folder.corpus_train.exists() and folder.corpus_validation.exists()):
        with timer.stage("corpus"):
            counts = write_corpus(folder, settings.source)
        console.print(
            f"corpus: {counts.train_documents} documents, {counts.train_bytes:,} bytes for training; "
            f"{counts.validation_documents} documents, {counts.validation_bytes:,} bytes for validation"
        )
    with timer.stage("tokenizer"), progress_bar("tokenizer") as progress:
        tokenizer = make_tokenizer(folder, settings, progress)
    stores: list[TokenStore] = []
    with timer.stage("prepare"):
        for corpus, store in ((folder.corpus_train, folder.train), (folder.corpus_validation, folder.validation)):
            with progress_bar(f"prepare {store.name}") as progress:
                stores.append(make_store(corpus, tokenizer, store, progress))
    with timer.stage("pack"):
        train_packed, validation_packed = (make_pack(store, settings) for store in stores)
    for name, packed in (("train", train_packed), ("validation", validation_packed)):
        store, rows = packed.store, packed.rows
        console.print(
            f"{name}: {store.n_documents:,} documents, {store.n_tokens:,} tokens, vocabulary {store.vocab_size:,}, "
            f"{rows.n_rows:,} rows of {rows.seq_len}"
        )
    return train_packed, validation_packed


def _training(
    console: Console, timer: StageTimer, folder: QuickstartFolder, settings: QuickstartSettings, data: PackedStore
) -> ResumeCheck:
    """Run stages 4 and 5: train, stop, resume."""
    if not folder.recipe.exists():
        write_recipe(folder, settings, data.rows)
    with timer.stage("training"), progress_bar("training") as progress:
        resume = train(folder, settings, progress)
    report.show_resume(console, resume, timer.seconds["training"])
    return resume


def _checks(
    console: Console,
    timer: StageTimer,
    folder: QuickstartFolder,
    settings: QuickstartSettings,
    train_packed: PackedStore,
    validation_packed: PackedStore,
) -> tuple[BaselineComparison, LogitCheck]:
    """Run stages 6 and 7: export and logits, baselines."""
    from lt_trainer.quickstart.logits import check_logits

    with timer.stage("export"):
        export_model(folder)
    with timer.stage("logits"):
        logits = check_logits(folder, validation_packed)
    report.show_logits(console, logits)
    val_loss, val_tokens = validation_loss(folder)
    with timer.stage("baselines"):
        comparison = compare_with_baselines(
            train_packed, validation_packed, settings, seed=0, val_loss=val_loss, val_tokens=val_tokens
        )
    report.show_comparison(console, comparison)
    return comparison, logits


def _samples(folder: QuickstartFolder) -> list[tuple[str, str]]:
    from lt_trainer.cli.sample import generate_text
    from lt_trainer.evaluation.local_model import load_model

    model = load_model(folder.model)
    return [
        (prompt, generate_text(model, prompt, max_new_tokens=60, temperature=0.7, top_k=40, top_p=1.0, seed=i))
        for i, prompt in enumerate(PROMPTS)
    ]


def _numbers(
    settings: QuickstartSettings, data: PackedStore, comparison: BaselineComparison, folder: QuickstartFolder
) -> dict[str, str | int | float]:
    config, last = preset(settings.preset, vocab_size=data.store.vocab_size), last_metrics(folder)
    return {
        "model": settings.preset,
        "parameters": n_parameters(config),
        "training tokens seen": comparison.seen_tokens,
        "steps": settings.steps,
        "first training loss": losses(folder)[1],
        "last training loss": last["loss"],
        "validation loss, nats/token": comparison.model.nats_per_token,
        "validation bits/byte": comparison.model.bits_per_byte,
        "seen-token bigram, nats/token": comparison.target_baseline.nats_per_token,
        "tokens/s": last["tokens_per_sec"],
        "MFU (attention counted in full)": last["mfu"],
        "MFU's peak": peak_source(folder),
        "run directory": str(folder.run),
        "Hugging Face model": str(folder.model),
    }


def check_results(resume: ResumeCheck, logits_equal: bool, comparison: BaselineComparison) -> None:
    """Check the results that the quickstart guarantees.

    Raises:
        QuickstartError: lists every failed check.
    """
    problems = []
    if not resume.is_equal:
        problems.append("the losses after the resume differ from those of the resume check")
    if not logits_equal:
        problems.append("transformers computes different logits from the exported model")
    if not comparison.beats_baseline:
        problems.append(
            f"the model ({comparison.model.nats_per_token:.4f} nats/token) does not beat a bigram over the same tokens "
            f"({comparison.target_baseline.nats_per_token:.4f}); use more --steps"
        )
    if problems:
        raise QuickstartError("; ".join(problems))
