"""The quickstart from beginning to end, in the order of the stages."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from lt_data import TokenStore
from lt_data.showing.bars import progress_bar
from lt_model import PRESETS, ModelError, n_parameters, preset
from lt_trainer.quickstart import report
from lt_trainer.quickstart.baselines import Comparison, compare
from lt_trainer.quickstart.corpus import write_corpus
from lt_trainer.quickstart.settings import Folder, QuickstartError, Settings
from lt_trainer.quickstart.stages import Packed, export, make_pack, make_store, make_tokenizer, write_recipe
from lt_trainer.quickstart.training import Resume, last_metrics, losses, peak_source, train, validation_loss
from lt_trainer.report.writing import write_report

if TYPE_CHECKING:
    from lt_trainer.quickstart.logits import LogitCheck

PROMPTS = ("def ", "class ", "import ", "    return ")


class Clock:
    """Seconds that each stage took in this start."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time what happens inside."""
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start


def main(*, out: Path, source: str, preset: str, steps: int, fresh: bool) -> None:
    """Run or go on with a quickstart.

    Raises:
        QuickstartError: what was asked for cannot be done, or the result is not what it must be.
    """
    console, clock = Console(), Clock()
    settings = _settings(source, preset, steps)
    folder = Folder(out)
    if folder.claim(settings, fresh=fresh):
        console.print(
            f"{out} holds a quickstart with these settings; going on with what is there (--fresh starts over)"
        )
    train_packed, validation_packed = _data(console, clock, folder, settings)
    resume = _training(console, clock, folder, settings, train_packed)
    comparison, logits = _checks(console, clock, folder, settings, train_packed, validation_packed)
    with clock.stage("sample"):
        report.show_samples(console, _samples(folder))
    numbers = _numbers(settings, train_packed, comparison, folder)
    report.summary(console, folder, numbers, clock.seconds)
    report.write_summary(
        folder.summary,
        settings=settings,
        resume=resume,
        logits=logits,
        comparison=comparison,
        numbers=numbers,
        seconds=clock.seconds,
    )
    write_report([folder.run], folder.report, overwrite=True)
    console.print(f"the run as a page, to open in a browser: {folder.report}", soft_wrap=True)
    report.show_commands(console, folder, settings)
    require(resume, logits.equal, comparison)


def _settings(source: str, name: str, steps: int) -> Settings:
    if name not in PRESETS:
        raise ModelError(f"--preset {name!r}: unknown; the presets are {', '.join(PRESETS)}")
    interpreter = "" if source else f"{platform.python_implementation()} {platform.python_version()}"
    source = str(Path(source).resolve()) if source and "://" not in source else source
    settings = Settings(source=source, interpreter=interpreter, preset=name)
    return Settings(source=source, interpreter=interpreter, preset=name, steps=steps or settings.steps)


def _data(console: Console, clock: Clock, folder: Folder, settings: Settings) -> tuple[Packed, Packed]:
    """Stages 1 to 3: corpus, tokenizer, token stores, packs."""
    if not (folder.corpus_train.exists() and folder.corpus_validation.exists()):
        with clock.stage("corpus"):
            counts = write_corpus(folder, settings.source)
        console.print(
            f"corpus: {counts.train_documents} documents, {counts.train_bytes:,} bytes to train on; "
            f"{counts.validation_documents} documents, {counts.validation_bytes:,} bytes to validate on"
        )
    with clock.stage("tokenizer"), progress_bar("tokenizer") as progress:
        tokenizer = make_tokenizer(folder, settings, progress)
    stores: list[TokenStore] = []
    with clock.stage("prepare"):
        for corpus, store in ((folder.corpus_train, folder.train), (folder.corpus_validation, folder.validation)):
            with progress_bar(f"prepare {store.name}") as progress:
                stores.append(make_store(corpus, tokenizer, store, progress))
    with clock.stage("pack"):
        train_packed, validation_packed = (make_pack(store, settings) for store in stores)
    for name, packed in (("train", train_packed), ("validation", validation_packed)):
        store, rows = packed.store, packed.rows
        console.print(
            f"{name}: {store.n_documents:,} documents, {store.n_tokens:,} tokens of {store.vocab_size:,} kinds, "
            f"{rows.n_rows:,} rows of {rows.seq_len}"
        )
    return train_packed, validation_packed


def _training(console: Console, clock: Clock, folder: Folder, settings: Settings, data: Packed) -> Resume:
    """Stages 4 and 5: train, stop, resume."""
    if not folder.recipe.exists():
        write_recipe(folder, settings, data.rows)
    with clock.stage("training"), progress_bar("training") as progress:
        resume = train(folder, settings, progress)
    report.show_resume(console, resume, clock.seconds["training"])
    return resume


def _checks(
    console: Console, clock: Clock, folder: Folder, settings: Settings, train_packed: Packed, validation_packed: Packed
) -> tuple[Comparison, LogitCheck]:
    """Stages 6 and 7: export and logits, baselines."""
    from lt_trainer.quickstart.logits import check_logits

    with clock.stage("export"):
        export(folder)
    with clock.stage("logits"):
        logits = check_logits(folder, validation_packed)
    report.show_logits(console, logits)
    val_loss, val_tokens = validation_loss(folder)
    with clock.stage("baselines"):
        comparison = compare(
            train_packed, validation_packed, settings, seed=0, val_loss=val_loss, val_tokens=val_tokens
        )
    report.show_comparison(console, comparison)
    return comparison, logits


def _samples(folder: Folder) -> list[tuple[str, str]]:
    from lt_trainer.sample import load, sample

    loaded = load(folder.model)
    return [
        (prompt, sample(loaded, prompt, max_new_tokens=60, temperature=0.7, top_k=40, top_p=1.0, seed=i))
        for i, prompt in enumerate(PROMPTS)
    ]


def _numbers(settings: Settings, data: Packed, comparison: Comparison, folder: Folder) -> dict[str, str | int | float]:
    config, last = preset(settings.preset, vocab_size=data.store.vocab_size), last_metrics(folder)
    steps = losses(folder)
    return {
        "model": settings.preset,
        "parameters": n_parameters(config),
        "training tokens seen": comparison.seen_tokens,
        "steps": settings.steps,
        "first training loss": steps[1],
        "last training loss": last["loss"],
        "validation loss, nats/token": comparison.model.nats_per_token,
        "validation bits/byte": comparison.model.bits_per_byte,
        "seen-token bigram, nats/token": comparison.opponent.nats_per_token,
        "tokens/s": last["tokens_per_sec"],
        "MFU (attention counted in full)": last["mfu"],
        "MFU's peak": peak_source(folder),
        "run directory": str(folder.run),
        "Hugging Face model": str(folder.model),
    }


def require(resume: Resume, logits_equal: bool, comparison: Comparison) -> None:
    """Refuse a result that is not what the quickstart promises.

    Raises:
        QuickstartError: naming everything that failed.
    """
    problems = []
    if not resume.equal:
        problems.append("the losses after the resume are not those of the shadow steps")
    if not logits_equal:
        problems.append("transformers computes other logits from the exported model")
    if not comparison.beaten:
        problems.append(
            f"the model ({comparison.model.nats_per_token:.4f} nats/token) does not beat a bigram that has seen the "
            "same tokens "
            f"({comparison.opponent.nats_per_token:.4f}); more --steps help"
        )
    if problems:
        raise QuickstartError("; ".join(problems))
