"""The stages that make things: tokenizer, stores, packs, recipe, export. Each looks first whether its result is there.

A result appears under its name only when it is complete (each writer renames at the end), so "it is there" is enough.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from lt_ckpt import export_hf, resolve
from lt_data import Progress, RowReader, Tokenizer, TokenStore, open_pack, pack, prepare, read_documents, train_bpe
from lt_trainer.fields import flatten
from lt_trainer.quickstart.settings import Folder, QuickstartError, Settings
from lt_trainer.recipe import load
from lt_trainer.toml import dump


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A token store with its rows."""

    store: TokenStore
    rows: RowReader


def make_tokenizer(folder: Folder, settings: Settings, progress: Progress) -> Tokenizer:
    """A byte-level BPE tokenizer, trained on the training documents."""
    if not folder.tokenizer.exists():
        texts = (document.as_text() for document in read_documents([folder.corpus_train]))
        train_bpe(texts, vocab_size=settings.vocab_size, progress=progress).save(folder.tokenizer)
    return Tokenizer.load(folder.tokenizer)


def make_store(corpus: Path, tokenizer: Tokenizer, out: Path, progress: Progress) -> TokenStore:
    """A token store of one half of the corpus."""
    if not out.exists():
        prepare([corpus], tokenizer=tokenizer, out=out, progress=progress)
    return TokenStore.open(out)


def make_pack(store: TokenStore, settings: Settings) -> Packed:
    """Best-fit rows over a store."""
    pack(store, seq_len=settings.seq_len, mode="bfd")
    return Packed(store=store, rows=RowReader(store, open_pack(store, seq_len=settings.seq_len, mode="bfd")))


def write_recipe(folder: Folder, settings: Settings, rows: RowReader) -> Path:
    """The recipe of the run, checked and written: what differs from the defaults.

    Raises:
        QuickstartError: the corpus is too small for one batch.
        RecipeError: the preset is unknown or does not fit.
    """
    if rows.n_rows < settings.global_batch:
        raise QuickstartError(
            f"the corpus gives {rows.n_rows} row(s) of {settings.seq_len} tokens and one batch takes "
            f"{settings.global_batch}; give more text with --source"
        )
    warmup = max(1, settings.steps // 20)
    base = {
        "run": {"out": str(folder.run)},
        "model": {"preset": settings.preset},
        "data": {"store": str(folder.train), "validation": str(folder.validation), "seq_len": settings.seq_len},
        "batch": {"global_batch": settings.global_batch, "micro_batch": settings.micro_batch},
        "optimizer": {"lr": settings.lr, "weight_decay": 0.1},
        "schedule": {"max_steps": settings.steps, "warmup_steps": warmup, "min_lr": settings.lr / 10},
        "checkpoint": {"interval": max(50, settings.steps // 4), "keep_last": 2},
        "metrics": {"log_interval": 1},
        "engine": {"gpu": {"deterministic": True}},
    }
    load(base=base, base_name="quickstart")  # refuse what cannot run before it is written
    temporary = folder.recipe.with_suffix(".tmp")
    try:
        temporary.write_text(dump(flatten(base)))
        os.replace(temporary, folder.recipe)
    except OSError as exc:
        raise QuickstartError(
            f"cannot write {folder.recipe}: {exc.strerror}; free space or name another folder with --out"
        ) from exc
    return folder.recipe


def export(folder: Folder) -> Path:
    """The newest checkpoint as a Hugging Face folder, in several files so that the index is there to see."""
    if not folder.model.exists():
        checkpoint, _ = resolve(folder.run)
        weights = sum(spec.n_bytes for spec in checkpoint.specs("weights").values())
        export_hf(checkpoint, folder.model, max_shard_bytes=weights // 2 + 1)
    return folder.model
