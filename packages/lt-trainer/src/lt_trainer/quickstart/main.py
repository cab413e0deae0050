"""The quickstart: lt's own commands one after another, each unless its result exists.

    lt data train-tokenizer, prepare, pack      text to token stores
    lt train run                                stopped early, resumed to the end; its first steps once more undisturbed
    lt ckpt export, verify                      a Hugging Face model with the bits of the checkpoint
    lt train sample, report                     what it writes, and a page about the run

A command makes its result under the final name only when it is complete, so existence means completeness. The losses of
both runs must be equal bit for bit, before the stop and after it: so the checkpoint has the whole state.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lt_data.display.terminal import echo
from lt_model import PRESETS, ModelError
from lt_trainer.config.recipe import load
from lt_trainer.config.section import flatten
from lt_trainer.constants import EXIT_DONE, EXIT_REQUEUE
from lt_trainer.files import write_atomic
from lt_trainer.quickstart.corpus import write_corpus
from lt_trainer.quickstart.settings import QuickstartError, claim_folder
from lt_trainer.run_directory.jsonl import read_jsonl
from lt_trainer.toml import dump, format_value

MODULES = {"data": "lt_data", "train": "lt_trainer", "ckpt": "lt_ckpt"}
VOCAB_SIZE, SEQ_LEN, BATCH_SIZE, LEARNING_RATE = 2048, 256, 4, 2e-3
MIN_STEPS = 4


def main(*, out: Path, source: str, preset: str, steps: int, overwrite: bool) -> None:
    """Run or continue a quickstart.

    Raises:
        QuickstartError: Invalid settings, a command failed, or the resume was not exact.
    """
    if preset not in PRESETS:
        raise ModelError(f"--preset = {format_value(preset)}: unknown preset; `lt model list` shows all")
    if steps < MIN_STEPS:
        raise QuickstartError(f"--steps = {steps}: must be at least {MIN_STEPS}, to stop halfway and resume")
    source = os.path.realpath(source) if source and "://" not in source else source
    if claim_folder(out, {"source": source, "preset": preset, "steps": steps}, overwrite=overwrite):
        echo(f"{out} has a quickstart with these settings; continuing it (--overwrite starts over)")
    seconds: dict[str, float] = {}
    _prepare_data(out, source, seconds)
    _write_recipe(out, preset, steps)
    n_equal = _train(out, steps, seconds)
    if not (out / "model").exists():
        _run(seconds, "ckpt", "export", out / "run", "--out", out / "model")
    _run(seconds, "ckpt", "verify", out / "model", "--against", out / "run")
    _run(seconds, "train", "sample", out / "model", "def ")
    _run(seconds, "train", "report", out / "run", "--out", out / "report.html", "--overwrite")
    records = read_jsonl(out / "run" / "metrics.jsonl")
    last = [record for record in records if "loss" in record][-1]
    validated = [record["val_loss"] for record in records if "val_loss" in record]
    summary = {"steps": last["step"], "loss": last["loss"], "tokens_per_sec": last["tokens_per_sec"]}
    summary |= {"val_loss": validated[-1], "equal_losses": n_equal, "seconds": seconds}
    write_atomic(out / "summary.json", json.dumps(summary, indent=1) + "\n")
    echo(f"{n_equal} losses with a stop and a resume equal those of an undisturbed run, bit for bit")
    echo(f"validation loss {validated[-1]:.4f} nats per token; {sum(seconds.values()):.0f} s in all")
    echo(f"model: {out / 'model'}; report of the run, to open in a browser: {out / 'report.html'}")


def _prepare_data(out: Path, source: str, seconds: dict[str, float]) -> None:
    if not (out / "corpus").exists():
        trained, held_out = write_corpus(out / "corpus", source)
        echo(f"corpus: {trained} documents for training, {held_out} for validation")
    if not (out / "tokenizer").exists():
        size = ("--vocab-size", VOCAB_SIZE)
        _run(seconds, "data", "train-tokenizer", out / "corpus/train.jsonl", *size, "--out", out / "tokenizer")
    for name in ("train", "validation"):
        store = out / name
        if not store.exists():
            tokenizer = ("--tokenizer", out / "tokenizer")
            _run(seconds, "data", "prepare", out / f"corpus/{name}.jsonl", *tokenizer, "--out", store)
        if not (store / "packs").exists():
            _run(seconds, "data", "pack", store, "--seq-len", SEQ_LEN, "--mode", "bfd")


def _write_recipe(out: Path, preset: str, steps: int) -> None:
    values: dict[str, Any] = {
        "run": {"dir": str(out / "run")},
        "model": {"preset": preset},
        "data": {"store": str(out / "train"), "validation": str(out / "validation"), "seq_len": SEQ_LEN},
        "batch": {"global_batch_size": BATCH_SIZE, "micro_batch_size": BATCH_SIZE},
        "optimizer": {"lr": LEARNING_RATE, "weight_decay": 0.1},
        "schedule": {"max_steps": steps, "warmup_steps": max(1, steps // 20), "min_lr": LEARNING_RATE / 10},
        "checkpoint": {"interval": max(50, steps // 4), "keep_last": 2},
        "metrics": {"log_interval": _log_interval(steps)},
        "engine": {"gpu": {"deterministic": True, "compile": False}},
    }
    load(base=values, base_name="quickstart")  # validate before writing
    write_atomic(out / "run.toml", dump(flatten(values)))


def _log_interval(steps: int) -> int:
    return max(1, steps // 100)


def _train(out: Path, steps: int, seconds: dict[str, float]) -> int:
    """Train with a stop and a resume, and the first steps without; return the number of equal losses.

    Raises:
        QuickstartError: A loss differs, or training was stopped.
    """
    recipe, shown = out / "run.toml", 10 * _log_interval(steps)
    stop, end = min(shown // 2, steps // 2), min(shown, steps)
    codes = (EXIT_DONE, EXIT_REQUEUE)
    if not (out / "run").exists():
        _run(seconds, "train", "run", recipe, "--stop-after-step", stop, codes=codes)
    if max(_losses(out / "run"), default=0) < steps:
        _run(seconds, "train", "run", recipe)
    undisturbed = out / "undisturbed"
    if max(_losses(undisturbed), default=0) < end:
        options = ("--set", f"run.dir={json.dumps(str(undisturbed))}", "--stop-after-step", end)
        _run(seconds, "train", "run", recipe, *options, codes=codes)
    losses = _losses(out / "run")
    different = [step for step, loss in _losses(undisturbed).items() if losses.get(step) != loss]
    if different:
        raise QuickstartError(f"step {different[0]}: the loss after a resume is not that of an undisturbed run")
    return len(_losses(undisturbed))


def _losses(run: Path) -> dict[int, float]:
    path = run / "metrics.jsonl"
    return {record["step"]: record["loss"] for record in read_jsonl(path) if "loss" in record} if path.exists() else {}


def _run(seconds: dict[str, float], *words: str | int | Path, codes: tuple[int, ...] = (EXIT_DONE,)) -> None:
    """Print a command of lt and run it; add its wall time."""
    given = [str(word) for word in words]
    echo(f"\n$ lt {shlex.join(given)}")
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-P", "-m", MODULES[given[0]], *given[1:]])
    try:
        code = process.wait()
    except KeyboardInterrupt:  # the command has it too: training saves first
        process.wait()
        raise
    name = " ".join(given[:2])
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start
    if code not in codes:
        raise QuickstartError(f"lt {shlex.join(given)}: exit code {code}; the same quickstart again continues")
