"""Adapter of lm-evaluation-harness: our model as one of its models, and its tasks (extra `eval`).

Log-likelihoods come from `lt_trainer.evaluation.score_requests`, so its requests are packed into rows by length;
contexts and continuations are encoded as its own Hugging Face model does (`PairEncoder`). Text is generated in batches
of requests with prompts of like lengths, some tokens between two looks for a stop string.

Only this file imports lm_eval.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate, utils
from lm_eval.api.model import LM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager

from lt_data.progress import Progress, no_progress
from lt_model import generate_batch
from lt_trainer.evaluation.encoding import PairEncoder
from lt_trainer.evaluation.local_model import LoadedModel
from lt_trainer.evaluation.requests import Score, ScoreRequest, check_requests, score_requests
from lt_trainer.evaluation.scorer import BatchShape, EvaluationError

TOKENS_BETWEEN_STOPS = 32
"""Tokens generated between two looks for a stop string."""
DEFAULT_MAX_NEW_TOKENS = 256


class HarnessModel(LM):
    """Model of lm-evaluation-harness on one device.

    Args:
        loaded: the model.
        shape: rows of a batch; its `seq_len` is the model's length for the harness.
        progress: called for the batches of log-likelihoods.
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
        prompts = [self._prompt(index, *instance.args) for index, instance in enumerate(requests)]
        groups: dict[tuple[Any, ...], list[_Prompt]] = {}
        for prompt in sorted(prompts, key=lambda one: len(one.ids), reverse=True):
            groups.setdefault(prompt.options, []).append(prompt)
        size, found = self._shape.micro_batch_size, [""] * len(requests)
        done = 0
        for group in groups.values():
            for first in range(0, len(group), size):
                batch = group[first : first + size]
                for prompt, text in zip(batch, self._generate(batch), strict=True):
                    found[prompt.index] = text
                done += len(batch)
                self._progress(done, len(requests), "texts")
        for instance, text in zip(requests, found, strict=True):
            self.cache_hook.add_partial("generate_until", instance.args, text)
        return found

    def _score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        check_requests(requests, self._shape, "lm-evaluation-harness")
        return score_requests(
            self._loaded, requests, self._shape, on_batch=lambda done, total: self._progress(done, total, "batches")
        )

    def _prompt(self, index: int, context: str, given: Any) -> _Prompt:
        options = normalize_gen_kwargs(given, DEFAULT_MAX_NEW_TOKENS)
        room = self._shape.seq_len - options["max_gen_toks"]
        if room < 1:
            raise EvaluationError(
                f"a task asks for {options['max_gen_toks']} new tokens, and the model has a length of "
                f"{self._shape.seq_len}; raise --seq-len, or leave the task out"
            )
        temperature = float(options.get("temperature") or 0.0) if options.get("do_sample") else 0.0
        return _Prompt(
            index=index,
            ids=(self._encoder.encode(context) or [self._encoder.prefix_id])[-room:],
            max_new_tokens=options["max_gen_toks"],
            temperature=temperature,
            top_k=int(options.get("top_k") or 0),
            top_p=float(options.get("top_p") or 1.0),
            stops=tuple(stop for stop in options.get("until") or [] if stop),
        )

    def _generate(self, batch: Sequence[_Prompt]) -> list[str]:
        """Return the texts of prompts with the same options."""
        tokenizer, first = self._loaded.tokenizer, batch[0]
        end_ids = () if tokenizer.eos_id is None else (tokenizer.eos_id,)

        def is_finished(row: int, new_ids: list[int]) -> bool:
            if new_ids[-1] in end_ids or len(new_ids) % TOKENS_BETWEEN_STOPS:
                return new_ids[-1] in end_ids
            return any(stop in self._encoder.decode(new_ids) for stop in batch[row].stops)

        found = generate_batch(
            self._loaded.model,
            [prompt.ids for prompt in batch],
            max_new_tokens=first.max_new_tokens,
            temperature=first.temperature,
            top_k=first.top_k,
            top_p=first.top_p,
            seeds=[prompt.index for prompt in batch],
            is_finished=is_finished,
        )
        texts = []
        for prompt, new_ids in zip(batch, found, strict=True):
            text = self._encoder.decode(new_ids)
            for stop in prompt.stops:
                text = text.split(stop)[0]
            texts.append(text)
        return texts


@dataclass(frozen=True, kw_only=True)
class _Prompt:
    """Request for a text: its place among the requests, its ids and options."""

    index: int
    ids: list[int]
    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    stops: tuple[str, ...]

    @property
    def options(self) -> tuple[Any, ...]:
        """Options that a batch shares."""
        return self.max_new_tokens, self.temperature, self.top_k, self.top_p


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
        progress: called for the batches of log-likelihoods.

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
