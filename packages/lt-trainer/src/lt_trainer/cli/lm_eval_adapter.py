"""Adapter of lm-evaluation-harness: our model as one of its models, and its tasks (extra `eval`).

Log-likelihoods come from `lt_trainer.evaluation.score_requests`, so its requests are packed into rows by length;
contexts and continuations are encoded as its own Hugging Face model does (`PairEncoder`). Text is generated one request
at a time, some tokens between two looks for a stop string, each time with the prompt computed anew.

Only this file imports lm_eval.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate, utils
from lm_eval.api.model import LM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager

from lt_data.progress import Progress, no_progress
from lt_model import generate
from lt_trainer.evaluation import (
    BatchShape,
    EvaluationError,
    LoadedModel,
    PairEncoder,
    Score,
    ScoreRequest,
    check_requests,
    score_requests,
)

TOKENS_BETWEEN_STOPS = 32
"""Tokens generated between two looks for a stop string."""
DEFAULT_MAX_NEW_TOKENS = 256


class HarnessModel(LM):
    """Model of lm-evaluation-harness on one device.

    Args:
        loaded: the model.
        shape: rows of a batch; its `seq_len` is the model's length for the harness.
        progress: told of the batches of log-likelihoods.
    """

    def __init__(self, loaded: LoadedModel, shape: BatchShape, *, progress: Progress = no_progress) -> None:
        super().__init__()
        self._loaded, self._shape, self._progress = loaded, shape, progress
        self._encoder = PairEncoder(loaded.tokenizer)

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer, for the harness's caches."""
        return f"{self._loaded.tokenizer.name}-{self._loaded.tokenizer.sha256[:16]}"

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        """Return log-probability and greedy flag of each continuation after its context."""
        encoded = [self._encoder.request(*instance.args) for instance in requests]
        found = [(score.log_prob, score.is_greedy) for score in self._score(encoded)]
        for instance, answer in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", instance.args, answer)
        return found

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        """Return the log-probability of each whole text, in windows that do not overlap."""
        windows: list[ScoreRequest] = []
        owners: list[int] = []
        for index, instance in enumerate(requests):
            for pair in utils.get_rolling_token_windows(
                token_list=self._encoder.encode(instance.args[0]),
                prefix_token=self._encoder.prefix_id,
                max_seq_len=self._shape.seq_len,
                context_len=1,
            ):
                context, continuation = utils.make_disjoint_window(pair)
                windows.append(ScoreRequest(context=tuple(context), continuation=tuple(continuation)))
                owners.append(index)
        totals = [0.0] * len(requests)
        for owner, score in zip(owners, self._score(windows), strict=True):
            totals[owner] += score.log_prob
        for instance, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", instance.args, total)
        return totals

    def generate_until(self, requests: list[Any]) -> list[str]:
        """Return the text generated after each context, up to its first stop string."""
        found = []
        for instance in requests:
            context, given = instance.args
            text = self._generate(context, normalize_gen_kwargs(given, DEFAULT_MAX_NEW_TOKENS))
            self.cache_hook.add_partial("generate_until", instance.args, text)
            found.append(text)
        return found

    def _score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        check_requests(requests, self._shape, "lm-evaluation-harness")
        return score_requests(
            self._loaded, requests, self._shape, on_batch=lambda done, total: self._progress(done, total, "batches")
        )

    def _generate(self, context: str, options: Any) -> str:
        stops = [stop for stop in options.get("until") or [] if stop]
        max_new_tokens = options["max_gen_toks"]
        room = self._shape.seq_len - max_new_tokens
        if room < 1:
            raise EvaluationError(
                f"a task asks for {max_new_tokens} new tokens, and the model has a length of {self._shape.seq_len}; "
                "raise --seq-len, or leave the task out"
            )
        tokenizer = self._loaded.tokenizer
        end_ids = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
        prompt = (self._encoder.encode(context) or [self._encoder.prefix_id])[-room:]
        new_ids: list[int] = []
        while len(new_ids) < max_new_tokens:
            more = generate(
                self._loaded.model,
                [*prompt, *new_ids],
                max_new_tokens=min(TOKENS_BETWEEN_STOPS, max_new_tokens - len(new_ids)),
                temperature=float(options.get("temperature") or 0.0) if options.get("do_sample") else 0.0,
                top_k=int(options.get("top_k") or 0),
                top_p=float(options.get("top_p") or 1.0),
                seed=len(new_ids),
                stop_token_ids=end_ids,
            )
            new_ids += more
            text = self._encoder.decode(new_ids)
            if more[-1] in end_ids or any(stop in text for stop in stops):
                break
        text = self._encoder.decode(new_ids)
        for stop in stops:
            text = text.split(stop)[0]
        return text


def evaluate_harness_tasks(
    loaded: LoadedModel,
    shape: BatchShape,
    tasks: Sequence[str],
    *,
    include_path: Path | None = None,
    limit: int = 0,
    num_fewshot: int | None = None,
    progress: Progress = no_progress,
) -> dict[str, tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Run tasks of lm-evaluation-harness; return metrics and samples by task, of a group by each.

    Args:
        loaded: the model.
        shape: rows of a batch.
        tasks: names of tasks or groups.
        include_path: folder of further task files of the harness.
        limit: documents of each task, the first ones; 0 for all.
        num_fewshot: examples before each question; None for the task's own number.
        progress: told of the batches of log-likelihoods.

    Raises:
        EvaluationError: no such task.
    """
    manager = TaskManager(include_path=None if include_path is None else str(include_path))
    if unknown := [name for name in tasks if name not in manager.all_tasks]:
        raise EvaluationError(
            f"lm-evaluation-harness has no task {unknown[0]!r}; list its tasks with lm-eval ls tasks, or name "
            "the folder of your own with --include-path"
        )
    results = simple_evaluate(
        model=HarnessModel(loaded, shape, progress=progress),
        tasks=list(tasks),
        task_manager=manager,
        num_fewshot=num_fewshot,
        limit=limit or None,
        log_samples=True,
        bootstrap_iters=0,
    )
    assert results is not None, "the only rank has the results"
    samples: dict[str, list[dict[str, Any]]] = dict(results.get("samples", {}))
    return {
        task: ({name: value for name, value in metrics.items() if name != "alias"}, samples.get(task, []))
        for task, metrics in results["results"].items()
    }
