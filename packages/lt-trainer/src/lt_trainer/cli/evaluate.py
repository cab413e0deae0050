"""`lt train evaluate` on one device: losses over stores and tasks of lm-evaluation-harness.

Each store and task is one unit of work, a line of results.jsonl: a repeated command goes on after the units that it
finds. Results of a run's checkpoint are kept in the run directory unless a folder is given.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lt_data import RowReader, TokenStore, open_pack
from lt_data.display.progress_bars import progress_bar
from lt_trainer.checkpointing.pretrained import tokens_by_id
from lt_trainer.cli.sample import describe_model
from lt_trainer.evaluation.local_model import LoadedModel, load_model
from lt_trainer.evaluation.scorer import BatchShape, EvaluationError
from lt_trainer.evaluation.store_losses import StoreGroups, evaluate_store
from lt_trainer.run_directory.evaluation_results import EvaluationResults

N_SHOWN = 20
"""Source files shown of a store; the file has all."""


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Options of the command that change numbers."""

    tasks: Sequence[str] = ()
    """Names of tasks, groups or tags of lm-evaluation-harness."""
    include_path: Path | None = None
    """Folder of further task files."""
    num_fewshot: int | None = None
    """Examples before each question; None: the task's own number."""
    limit: int = 0
    """Items of each task, the first ones; 0 for all."""
    stores: Sequence[Path] = ()
    device: str = "auto"
    dtype: str = "auto"
    seq_len: int = 0
    """Positions per row; 0: the model's context length."""
    micro_batch_size: int = 1


def evaluate(model: Path, options: EvaluateOptions, *, out: Path | None, echo: Any) -> None:
    """Evaluate a model and print the results.

    Args:
        model: checkpoint, run directory or model of another format.
        options: what to evaluate, and how.
        out: folder of the results; None for that of the checkpoint's run, or for none.
        echo: prints a line.

    Raises:
        EvaluationError: nothing to evaluate, no such task, options that do not fit the model, or results of
            another evaluation.
        CheckpointError: the model cannot be loaded.
        DataError: a store cannot be read, or has no pack of this row length.
    """
    if not (options.stores or options.tasks):
        raise EvaluationError("nothing to evaluate; pass --tasks NAMES or --store STORE")
    if options.tasks:
        require_harness("--tasks")
    loaded = load_model(model, device=options.device, dtype=options.dtype)
    shape = _shape(loaded, options)
    readers = {str(path): _open_reader(loaded, path, shape) for path in options.stores}
    description = {**describe_model(loaded), "seq_len": shape.seq_len}
    results = EvaluationResults.open(out or _run_results_folder(loaded, description["dtype"]), description)
    if options.tasks:
        _evaluate_tasks(loaded, shape, options, results, echo)
    for name, reader in readers.items():
        kept = {"fingerprint": reader.store.manifest.fingerprint, "pack": reader.pack.fingerprint}
        losses = results.find("store", name, kept)
        if losses is None:
            groups = StoreGroups(reader.store, 0, 1)
            with progress_bar(name) as bar:
                found = evaluate_store(
                    loaded, reader, groups, shape, name=name, on_batch=lambda done, total: bar(done, total, "batches")
                )
            losses = [loss.to_dict() for loss in found]
            results.add("store", name, kept, losses)
        for line in _store_lines(losses):
            echo(line)
    if out is None and results.folder is not None:
        echo(f"results: {results.folder}")


def require_harness(option: str) -> None:
    """Raise EvaluationError unless lm-evaluation-harness is installed, naming the option that needs it."""
    if find_spec("lm_eval") is None:
        raise EvaluationError(f"{option} needs lm-evaluation-harness; pip install 'lt-trainer[eval]'")


def _evaluate_tasks(
    loaded: LoadedModel, shape: BatchShape, options: EvaluateOptions, results: EvaluationResults, echo: Any
) -> None:
    """Run the tasks one by one, and print and keep their results."""
    from lt_trainer.evaluation.harness import HarnessModel, load_tasks, run_tasks

    kept = {"limit": options.limit, "num_fewshot": options.num_fewshot, "lm_eval": version("lm-eval")}
    kept["sha256"] = _hash_task_files(options.include_path)
    for name in options.tasks:
        summaries = results.find("task", name, kept)
        if summaries is None:
            tasks = load_tasks(
                [name],
                include_path=options.include_path or "",
                num_fewshot=options.num_fewshot,
                may_generate=True,
            )
            with progress_bar(name) as bar:
                model = HarnessModel(
                    loaded,
                    loaded.tokenizer,
                    shape,
                    generator=loaded,
                    on_batch=lambda done, total: bar(done, total, "batches"),
                )
                found = run_tasks(model, tasks, limit=options.limit)
            for result in found:
                if result.items:
                    results.write_items(result.file_stem, result.items)
            summaries = [{"task": one.task, "n_items": one.n_items, **one.metrics} for one in found]
            results.add("task", name, kept, summaries)
        for summary in summaries:
            echo(_task_line(summary))


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


def _shape(loaded: LoadedModel, options: EvaluateOptions) -> BatchShape:
    context_length = loaded.model.config.max_position_embeddings
    seq_len = options.seq_len or context_length
    if seq_len > context_length:
        raise EvaluationError(
            f"--seq-len {seq_len}: {loaded.source} has a context of {context_length} tokens; pass at most that"
        )
    return BatchShape(micro_batch_size=options.micro_batch_size, seq_len=seq_len)


def _open_reader(loaded: LoadedModel, path: Path, shape: BatchShape) -> RowReader:
    store = TokenStore.open(path)
    ours, theirs = (tokens_by_id(one.files["tokenizer.json"]) for one in (loaded.tokenizer, store.tokenizer()))
    if differing := [i for i in sorted(theirs) if ours.get(i) != theirs[i]]:
        i = differing[0]
        raise EvaluationError(
            f"store {path} was prepared with another tokenizer than that of {loaded.source}: id {i} is {theirs[i]!r} "
            f"in the store and {ours.get(i)!r} in the model; prepare the text with the model's tokenizer"
        )
    return RowReader(store, open_pack(store, seq_len=shape.seq_len))


def _task_line(summary: Mapping[str, Any]) -> str:
    """Return the metrics of a task as a line."""
    metrics = [
        f"{name} {value:.4g}" + (f" +- {summary[f'{name}_stderr']:.2g}" if f"{name}_stderr" in summary else "")
        for name, value in summary.items()
        if name not in ("task", "n_items") and not name.endswith("_stderr")
    ]
    items = f" ({summary['n_items']:,} items)" if summary["n_items"] else ""
    return f"{summary['task']}: {', '.join(metrics)}{items}"


def _store_lines(losses: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the losses of a store as a table."""
    lines = [f"{'documents':>10} {'tokens':>12} {'loss':>9} {'perplexity':>11} {'bits/byte':>9}"]
    sources = [loss for loss in losses if loss["group"] == "source"]
    for loss in losses:
        if loss in sources[N_SHOWN:]:
            continue
        label = {"all": loss["store"], "source": f"  {loss['name']}", "length": f"  {loss['name']} tokens"}
        lines.append(
            f"{loss['documents']:>10,} {loss['tokens']:>12,} {loss['loss']:>9.4f} {loss['perplexity']:>11.4g} "
            f"{loss['bits_per_byte']:>9.4f}  {label[loss['group']]}"
        )
    if len(sources) > N_SHOWN:
        lines.append(f"  and {len(sources) - N_SHOWN} further source files")
    return lines
