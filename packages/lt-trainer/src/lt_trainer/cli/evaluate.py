"""`lt train evaluate` on one device: losses over stores and tasks, as a table and as JSON lines.

Each store and task is one unit of work (`lt_trainer.evaluation.results`): a repeated command goes on after the units
that it finds. Results of a run's checkpoint are kept in the run directory unless a folder is given.
"""

from __future__ import annotations

import hashlib
import json
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
from lt_trainer.evaluation.encoding import PairEncoder
from lt_trainer.evaluation.local_model import LoadedModel, load_model
from lt_trainer.evaluation.scorer import BatchShape, EvaluationError
from lt_trainer.evaluation.store_losses import evaluate_store
from lt_trainer.evaluation.tasks import EncodedTask, evaluate_task, find_tasks
from lt_trainer.run_directory.evaluation_results import EvaluationResults

N_SHOWN = 20
"""Source files shown of a store; the file has all."""


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Options of the command that change numbers."""

    tasks: Sequence[str] = ()
    """Names of files in `tasks_dir`, or of generated tasks."""
    tasks_dir: str = ""
    lm_eval_tasks: Sequence[str] = ()
    """Names of tasks or groups of lm-evaluation-harness."""
    include_path: Path | None = None
    """Folder of further task files of the harness."""
    num_fewshot: int | None = None
    """Examples before each question of the harness's tasks; None: the task's own number."""
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
    if not (options.stores or options.tasks or options.lm_eval_tasks):
        raise EvaluationError("nothing to evaluate; pass --tasks NAMES, --lm-eval-tasks NAMES or --store STORE")
    if options.lm_eval_tasks and find_spec("lm_eval") is None:
        raise EvaluationError("--lm-eval-tasks needs lm-evaluation-harness; pip install 'lt-trainer[eval]'")
    tasks = find_tasks(options.tasks, options.tasks_dir, limit=options.limit)
    loaded = load_model(model, device=options.device, dtype=options.dtype)
    shape = _shape(loaded, options)
    readers = {str(path): _open_reader(loaded, path, options) for path in options.stores}
    encoder = PairEncoder(loaded.tokenizer) if tasks else None
    encoded = [EncodedTask.encode(task, encoder, shape) for task in tasks if encoder is not None]
    description = describe(loaded, options)
    results = EvaluationResults.open(out or run_results_folder(loaded, description["dtype"]), description)
    for task in encoded:
        name, kept = task.task.name, {"limit": options.limit, "sha256": task.task.sha256}
        summaries = results.find("task", name, kept)
        if summaries is None:
            with progress_bar(name) as progress:
                result = evaluate_task(
                    loaded, task, shape, on_batch=lambda done, total: progress(done, total, "batches")
                )
            results.write_items(name, result.items)
            summaries = [{"n_items": result.n_items, **result.metrics}]
            results.add("task", name, kept, summaries)
        echo(task_line(name, summaries[0]))
    _evaluate_with_harness(loaded, shape, options, results, echo)
    for name, reader in readers.items():
        kept = {"fingerprint": reader.store.manifest.fingerprint, "pack": reader.pack.fingerprint}
        losses = results.find("store", name, kept)
        if losses is None:
            with progress_bar(name) as progress:
                losses = [
                    loss.to_dict()
                    for loss in evaluate_store(
                        loaded, reader, shape, name=name, on_batch=lambda done, total: progress(done, total, "batches")
                    )
                ]
            results.add("store", name, kept, losses)
        for line in store_lines(losses):
            echo(line)
    if out is None and results.folder is not None:
        echo(f"results: {results.folder}")


def run_results_folder(loaded: LoadedModel, dtype: str) -> Path | None:
    """Return the folder of results in the run directory that a checkpoint is in; None for another model."""
    run = Path(os.path.realpath(loaded.source)).parent.parent
    if loaded.step is None or not (run / ".lt-run").exists():
        return None
    return run / "evaluation" / f"step-{loaded.step:08d}-{dtype}"


def _evaluate_with_harness(
    loaded: LoadedModel, shape: BatchShape, options: EvaluateOptions, results: EvaluationResults, echo: Any
) -> None:
    """Run the harness's tasks one by one, and print and keep their results."""
    if not options.lm_eval_tasks:
        return
    chosen = {"limit": options.limit, "num_fewshot": options.num_fewshot}
    kept = {**chosen, "lm_eval": version("lm-eval"), "sha256": _hash_task_files(options.include_path)}
    for name in options.lm_eval_tasks:
        summaries = results.find("lm_eval", name, kept)
        if summaries is None:
            from lt_trainer.cli.lm_eval_adapter import evaluate_harness_tasks

            with progress_bar(name) as progress:
                found = evaluate_harness_tasks(
                    loaded, shape, [name], include_path=options.include_path, progress=progress, **chosen
                )
            for task, (_, samples) in found.items():
                results.write_items(task, [sample_record(sample) for sample in samples])
            summaries = [{"task": task, "metrics": metrics} for task, (metrics, _) in found.items()]
            results.add("lm_eval", name, kept, summaries)
        for summary in summaries:
            metrics = (f"{metric} {value:.5g}" for metric, value in summary["metrics"].items() if is_number(value))
            echo(f"{summary['task']}: {', '.join(metrics)}")


def _hash_task_files(folder: Path | None) -> str:
    """Return the hash of the harness's task files in a folder: of changed ones, results do not count."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")) if folder is not None else ():
        if path.suffix in (".yaml", ".py", ".json", ".jsonl") and path.is_file():
            digest.update(f"{path.relative_to(folder or path)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def sample_record(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample of the harness as plain values: document, responses, target and metrics."""
    left_out = {"arguments", "resps", "doc_hash", "prompt_hash", "target_hash"}
    return json.loads(json.dumps({name: v for name, v in sample.items() if name not in left_out}, default=str))


def is_number(value: Any) -> bool:
    """Return True for a number, of the metrics of the harness."""
    return isinstance(value, int | float)


def describe(loaded: LoadedModel, options: EvaluateOptions) -> dict[str, Any]:
    """Return what numbers depend on besides the store or the task, and which model it is."""
    return {**describe_model(loaded), "seq_len": _shape(loaded, options).seq_len}


def _shape(loaded: LoadedModel, options: EvaluateOptions) -> BatchShape:
    context_length = loaded.model.config.max_position_embeddings
    seq_len = options.seq_len or context_length
    if seq_len > context_length:
        raise EvaluationError(
            f"--seq-len {seq_len}: {loaded.source} has a context of {context_length} tokens; pass at most that"
        )
    return BatchShape(micro_batch_size=options.micro_batch_size, seq_len=seq_len)


def _open_reader(loaded: LoadedModel, path: Path, options: EvaluateOptions) -> RowReader:
    store = TokenStore.open(path)
    if store.vocab_size > loaded.model.config.vocab_size:
        raise EvaluationError(
            f"store {path} has ids up to {store.vocab_size - 1}, and {loaded.source} has "
            f"{loaded.model.config.vocab_size} rows; prepare the text with the model's tokenizer"
        )
    # Files beside tokenizer.json may differ between a store and a model; what an id means may not.
    ours, theirs = (tokens_by_id(one.files["tokenizer.json"]) for one in (loaded.tokenizer, store.tokenizer()))
    if differing := [i for i in sorted(theirs) if ours.get(i) != theirs[i]]:
        i = differing[0]
        raise EvaluationError(
            f"store {path} was prepared with another tokenizer than that of {loaded.source}: id {i} is {theirs[i]!r} "
            f"in the store and {ours.get(i)!r} in the model; prepare the text with the model's tokenizer"
        )
    return RowReader(store, open_pack(store, seq_len=_shape(loaded, options).seq_len))


def task_line(name: str, summary: Mapping[str, Any]) -> str:
    """Return the metrics of a task as a line."""
    metrics = [
        f"{metric} {value:.4f} +- {summary[f'{metric}_stderr']:.4f}"
        if f"{metric}_stderr" in summary
        # a perplexity has no standard error here
        else f"{metric} {value:.5g}"
        for metric, value in summary.items()
        if metric != "n_items" and not metric.endswith("_stderr")
    ]
    return f"{name}: {', '.join(metrics)} ({summary['n_items']:,} items)"


def store_lines(losses: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the losses of a store as a table."""
    lines = [f"{'documents':>10} {'tokens':>12} {'loss':>9} {'perplexity':>11} {'bits/byte':>9}"]
    n_sources = 0
    for loss in losses:
        label = {"all": loss["store"], "source": f"  {loss['name']}", "length": f"  {loss['name']} tokens"}
        n_sources += loss["group"] == "source"
        if loss["group"] == "source" and n_sources > N_SHOWN:
            continue
        lines.append(
            f"{loss['documents']:>10,} {loss['tokens']:>12,} {loss['loss']:>9.4f} {loss['perplexity']:>11.4g} "
            f"{loss['bits_per_byte']:>9.4f}  {label[loss['group']]}"
        )
    if n_sources > N_SHOWN:
        lines.append(f"  and {n_sources - N_SHOWN} further source files")
    return lines
