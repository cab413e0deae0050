"""`lt train evaluate` on one device: losses over stores and tasks of lm-evaluation-harness.

Each store and task is one unit of work, a line of results.jsonl: a repeated command goes on after the units that it
finds. Results of a run's checkpoint are kept in the run directory unless a folder is given.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lt_data import RowReader, TokenStore, open_pack
from lt_data.display.progress_bars import progress_bar
from lt_trainer.evaluation.local_model import LoadedModel, load_model
from lt_trainer.evaluation.scorer import BatchShape, EvaluationError
from lt_trainer.evaluation.store_losses import evaluate_store
from lt_trainer.run_directory.evaluation_results import EvaluationResults, format_metrics

N_SHOWN = 40
"""Groups of documents shown of a store; the file has all."""


def evaluate(
    model: Path,
    *,
    tasks: Sequence[str] = (),
    include_path: Path | None = None,
    num_fewshot: int | None = None,
    limit: int = 0,
    stores: Sequence[Path] = (),
    device: str = "auto",
    dtype: str = "auto",
    seq_len: int = 0,
    micro_batch_size: int = 1,
    out: Path | None,
    echo: Any,
) -> None:
    """Evaluate a model and print the results.

    Args:
        model: checkpoint, run directory or model of another format.
        tasks: names of tasks, groups or tags of lm-evaluation-harness.
        include_path: folder of further task files.
        num_fewshot: examples before each question; None: the task's own number.
        limit: items of each task, the first ones; 0 for all.
        stores: token stores.
        device: as of `load_model`; dtype likewise.
        dtype: see there.
        seq_len: positions per row; 0: the model's context length.
        micro_batch_size: rows of a batch.
        out: folder of the results; None for that of the checkpoint's run, or for none.
        echo: prints a line.

    Raises:
        EvaluationError: nothing to evaluate, no such task, options that do not fit the model, or results of
            another evaluation.
        CheckpointError: the model cannot be loaded.
        DataError: a store cannot be read, or has no pack of this row length.
    """
    if not (stores or tasks):
        raise EvaluationError("nothing to evaluate; pass --tasks NAMES or --store STORE")
    loaded = load_model(model, device=device, dtype=dtype)
    context_length = loaded.model.config.max_position_embeddings
    if seq_len > context_length:
        raise EvaluationError(f"--seq-len {seq_len}: the context of {loaded.source} has {context_length} tokens")
    shape = BatchShape(micro_batch_size=micro_batch_size, seq_len=seq_len or context_length)
    readers = {str(path): _open_reader(loaded, path, shape) for path in stores}
    description = {
        "model": os.path.realpath(loaded.source),
        "step": loaded.step,
        "weights": loaded.weights_sha256,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "device": loaded.device.type,
        "seq_len": shape.seq_len,
    }
    results = EvaluationResults.open(out or _run_results_folder(loaded, description["dtype"]), description)
    if tasks:
        kept = {"limit": limit, "num_fewshot": num_fewshot, "sha256": _hash_task_files(include_path)}
        _evaluate_tasks(loaded, shape, tasks, include_path, kept, results, echo)
    for name, reader in readers.items():
        kept = {"fingerprint": reader.store.manifest.fingerprint, "pack": reader.pack.fingerprint}
        losses = results.find("store", name, kept)
        if losses is None:
            with progress_bar(name) as bar:
                losses = evaluate_store(
                    loaded, reader, shape, name=name, on_batch=lambda done, total: bar(done, total, "batches")
                )
            results.add("store", name, kept, losses)
        for loss in losses[:N_SHOWN]:
            echo(f"{loss['name'] or name}: {format_metrics(loss)}")
    if out is None and results.folder is not None:
        echo(f"results: {results.folder}")


def _evaluate_tasks(
    loaded: LoadedModel,
    shape: BatchShape,
    names: Sequence[str],
    include_path: Path | None,
    options: dict[str, Any],
    results: EvaluationResults,
    echo: Any,
) -> None:
    """Run the tasks one by one, and print and keep their results."""
    from lt_trainer.evaluation.harness import HarnessModel, load_tasks, run_tasks

    kept = {**options, "lm_eval": version("lm-eval")}
    for name in names:
        summaries = results.find("task", name, kept)
        if summaries is None:
            shots = options["num_fewshot"]
            tasks = load_tasks([name], include_path=include_path or "", num_fewshot=shots, may_generate=True)
            with progress_bar(name) as bar:
                model = HarnessModel(
                    loaded,
                    loaded.tokenizer,
                    shape,
                    generator=loaded,
                    on_batch=lambda done, total: bar(done, total, "batches"),
                )
                found = run_tasks(model, tasks, limit=options["limit"])
            for result in found:
                if result.items:
                    results.write_items(result.file_stem, result.items)
            summaries = [{"task": one.task, "n_items": one.n_items, **one.metrics} for one in found]
            results.add("task", name, kept, summaries)
        for summary in summaries:
            echo(f"{summary['task']}: {format_metrics(summary)}")


def _run_results_folder(loaded: LoadedModel, dtype: str) -> Path | None:
    """Return the folder of results in the run directory that a checkpoint is in; None for another model."""
    run = Path(os.path.realpath(loaded.source)).parent.parent
    if loaded.step is None or not (run / ".lt-run").exists():
        return None
    return run / "evaluation" / f"step-{loaded.step:08d}-{dtype}"


def _hash_task_files(folder: Path | None) -> str:
    """Return the hash of the task files in a folder: of changed ones, results do not count."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")) if folder is not None else ():
        if path.suffix in (".yaml", ".py", ".json", ".jsonl") and path.is_file():
            digest.update(f"{path.relative_to(folder or path)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def _open_reader(loaded: LoadedModel, path: Path, shape: BatchShape) -> RowReader:
    store = TokenStore(path)
    ours, theirs = (one.tokens_by_id() for one in (loaded.tokenizer, store.tokenizer()))
    if any(ours.get(i) != token for i, token in theirs.items()):
        raise EvaluationError(
            f"store {path} was prepared with another tokenizer than that of {loaded.source}; prepare the text with the "
            "model's"
        )
    return RowReader(store, open_pack(store, seq_len=shape.seq_len))
