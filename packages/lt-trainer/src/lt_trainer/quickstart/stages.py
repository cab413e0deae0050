"""Stages that create tokenizer, stores, packs, recipe and export, each unless its result exists.

A result appears under its name only when complete (each writer renames at the end), so existence means completeness.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lt_ckpt import export_hf, resolve_checkpoint
from lt_ckpt.discovery import describe_fallbacks
from lt_data import Progress, RowReader, Tokenizer, TokenStore, open_pack, pack, prepare, read_documents, train_bpe
from lt_data.display.terminal import echo_error
from lt_trainer.config.recipe import load
from lt_trainer.config.section import flatten
from lt_trainer.config.toml import dump
from lt_trainer.files import write_atomic
from lt_trainer.quickstart.settings import QuickstartError, QuickstartFolder, QuickstartSettings


@dataclass(frozen=True, kw_only=True)
class PackedStore:
    """Token store and its packed rows."""

    store: TokenStore
    rows: RowReader


def make_tokenizer(folder: QuickstartFolder, settings: QuickstartSettings, progress: Progress) -> Tokenizer:
    """Train a byte-level BPE tokenizer on the training documents."""
    if not folder.tokenizer.exists():
        texts = (document.as_text() for document in read_documents([folder.corpus_train]))
        train_bpe(texts, vocab_size=settings.vocab_size, progress=progress).save(folder.tokenizer)
    return Tokenizer.load(folder.tokenizer)


def make_store(corpus: Path, tokenizer: Tokenizer, out: Path, progress: Progress) -> TokenStore:
    """Tokenize one part of the corpus into a token store."""
    if not out.exists():
        prepare([corpus], tokenizer=tokenizer, out=out, progress=progress)
    return TokenStore.open(out)


def make_pack(store: TokenStore, settings: QuickstartSettings) -> PackedStore:
    """Pack a store with best-fit decreasing."""
    pack(store, seq_len=settings.seq_len, mode="bfd")
    return PackedStore(store=store, rows=RowReader(store, open_pack(store, seq_len=settings.seq_len, mode="bfd")))


def write_recipe(folder: QuickstartFolder, settings: QuickstartSettings, rows: RowReader) -> Path:
    """Validate and write the recipe of the run; it holds only non-default values.

    Raises:
        QuickstartError: the corpus is too small for one batch, or the file cannot be written.
        RecipeError: unknown or unsuitable preset.
    """
    if rows.n_rows < settings.global_batch_size:
        raise QuickstartError(
            f"the corpus has {rows.n_rows} row(s) of {settings.seq_len} tokens, but a batch needs "
            f"{settings.global_batch_size}; pass more text with --source"
        )
    warmup = max(1, settings.steps // 20)
    base = {
        "run": {"dir": str(folder.run)},
        "model": {"preset": settings.preset},
        "data": {"store": str(folder.train), "validation": str(folder.validation), "seq_len": settings.seq_len},
        "batch": {"global_batch_size": settings.global_batch_size, "micro_batch_size": settings.micro_batch_size},
        "optimizer": {"lr": settings.lr, "weight_decay": 0.1},
        "schedule": {"max_steps": settings.steps, "warmup_steps": warmup, "min_lr": settings.lr / 10},
        "checkpoint": {"interval": max(50, settings.steps // 4), "keep_last": 2},
        "metrics": {"log_interval": 1},
        "engine": {"gpu": {"deterministic": True, "compile": False}},
    }
    load(base=base, base_name="quickstart")  # validate before writing
    try:
        write_atomic(folder.recipe, dump(flatten(base)))
    except OSError as exc:
        raise QuickstartError(
            f"cannot write {folder.recipe}: {exc.strerror}; free space or choose another folder with --out"
        ) from exc
    return folder.recipe


def export_model(folder: QuickstartFolder) -> Path:
    """Export the newest checkpoint to a Hugging Face folder, in several shards with an index."""
    if not folder.model.exists():
        checkpoint, rejected = resolve_checkpoint(folder.run)
        for sentence in describe_fallbacks(checkpoint, rejected):
            echo_error(sentence)
        weight_bytes = sum(spec.n_bytes for spec in checkpoint.specs("weights").values())
        export_hf(checkpoint, folder.model, max_shard_bytes=weight_bytes // 2 + 1)
    return folder.model
