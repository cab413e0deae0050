"""lm-evaluation-harness (extra `eval`) on a model in memory: its tasks, prompts and metrics, our log-probabilities.

A run evaluates through its engine, on all ranks: every rank loads the same tasks, tells the harness that it is the only
one, makes the same calls and has the same results; `score_requests` shares the rows among the data-parallel ranks. No
global seed is set (`simple_evaluate` would set those of random, numpy and torch), and what the harness and its data
sets draw from these generators is taken back, so training does not notice.

Tasks and their data are read by `load_tasks`, before the first step. A standard error is given where a metric is the
mean of its items: their sample standard deviation over the square root of their number.

Cost: importing the harness takes seconds; a task the forward passes over its packed requests.
"""

from __future__ import annotations

import io
import json
import logging
import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import evaluate
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager

from lt_data import Tokenizer
from lt_trainer.evaluation.requests import Score, ScoreRequest, score_requests
from lt_trainer.evaluation.scorer import BatchShape, EvaluationError, Scorer, TaskResult

if TYPE_CHECKING:
    from lt_trainer.evaluation.local_model import LoadedModel

FEWSHOT_SEED = 1234
"""The harness's own default, of a generator of its own."""
TOKENS_BETWEEN_STOPS = 32
"""Tokens generated between two looks for a stop string."""
DEFAULT_MAX_NEW_TOKENS = 256
LEFT_OUT = ("arguments", "resps", "doc_hash", "prompt_hash", "target_hash", "metrics")
"""Fields of a sample that are not kept."""


@contextmanager
def _unnoticed() -> Iterator[None]:
    """Leave the global generators as they were."""
    states = random.getstate(), np.random.get_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])


@_unnoticed()
def load_tasks(
    names: Sequence[str], *, include_path: str | Path = "", num_fewshot: int | None = None, may_generate: bool = False
) -> Mapping[str, Any]:
    """Read tasks and their data.

    Args:
        names: Tasks, groups or tags of the harness.
        include_path: Folder of further task files; if it has all names, the harness's own are not looked through.
        num_fewshot: Examples before each question; None for each task's own number.
        may_generate: Whether texts can be generated; otherwise tasks that ask for them are refused.

    Raises:
        EvaluationError: no such task, or one that asks for generated text.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of every default of a task
    known, manager = set[str](), None
    if include_path:
        manager = TaskManager(include_path=str(include_path), include_defaults=False)
        known = set(manager.all_tasks)
    if manager is None or not known.issuperset(names):
        manager = TaskManager(include_path=str(include_path) if include_path else None)
        known = set(manager.all_tasks)
    if unknown := [name for name in names if name not in known]:
        raise EvaluationError(
            f"task {unknown[0]!r}: lm-evaluation-harness has none of that name; lm-eval ls tasks lists them, and "
            "include_path is for a folder of your own"
        )
    loaded = manager.load(list(names))
    for name, task in loaded["tasks"].items():
        if task.OUTPUT_TYPE == "generate_until" and not may_generate:
            raise EvaluationError(
                f"task {name!r} asks for generated text, which a run cannot make; evaluate it with lt train evaluate"
            )
        configured = task.get_config("num_fewshot")
        if num_fewshot is not None and configured != 0:
            task.set_config(key="num_fewshot", value=num_fewshot)
        elif configured is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
    return loaded


@_unnoticed()
def run_tasks(model: HarnessModel, tasks: Mapping[str, Any], *, limit: int = 0) -> list[TaskResult]:
    """Return the result of each task, and of each group after them; collective, and equal on all ranks.

    Args:
        model: The model.
        tasks: Result of `load_tasks`.
        limit: Items of each task, the first ones; 0 for all.
    """
    with ExitStack() as model.quiet:  # a bar of the harness for each task, until the scores begin
        model.quiet.enter_context(redirect_stderr(io.StringIO()))
        found: Any = evaluate(model, dict(tasks), limit=limit or None, bootstrap_iters=0)
    results = []
    for name, metrics in found["results"].items():
        samples = found["samples"].get(name, [])
        n_items = found["n-samples"].get(name, {}).get("effective", 0)
        items = [{key: value for key, value in one.items() if key not in LEFT_OUT} for one in samples]
        results.append(
            TaskResult(
                task=name,
                n_items=n_items,
                metrics=_numbers(metrics, samples),
                items=tuple(json.loads(json.dumps(items, default=str))),  # documents have values of any kind
            )
        )
    return results


def _numbers(metrics: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the metrics that are numbers; a filter's name stays unless it is the only one, "none"."""
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        metric, _, name_of_filter = name.partition(",")
        if not name_of_filter or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        key = metric if name_of_filter == "none" else f"{metric}_{name_of_filter}"
        numbers[key] = float(value)
        values = [one[metric] for one in samples if one.get("filter") == name_of_filter and metric in one]
        is_mean = len(values) > 1 and all(isinstance(one, int | float) for one in values)
        if is_mean and math.isclose(statistics.fmean(values), value, rel_tol=1e-9, abs_tol=1e-12):
            numbers[f"{key}_stderr"] = statistics.stdev(values) / math.sqrt(len(values))
    return numbers


class HarnessModel(TemplateLM):
    """Model of lm-evaluation-harness over a scorer.

    Args:
        scorer: An engine's rank, or a model on one device.
        tokenizer: Tokenizer of the model.
        shape: Shape of every batch.
        generator: The model that generates text; None if none can.
        on_batch: Called with the numbers of done and of all batches or texts.

    Raises:
        EvaluationError: the tokenizer has neither a beginning- nor an end-of-text token.
    """

    def __init__(
        self,
        scorer: Scorer,
        tokenizer: Tokenizer,
        shape: BatchShape,
        *,
        generator: LoadedModel | None = None,
        on_batch: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        super().__init__()
        self.quiet = ExitStack()
        self._scorer, self._shape, self._generator, self.on_batch = scorer, shape, generator, on_batch
        self._encoder = tokenizers.Tokenizer.from_buffer(tokenizer.files["tokenizer.json"])
        self._encoder.no_padding()
        self._encoder.no_truncation()
        self._eos_id = tokenizer.eos_id
        prefix_id = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
        if prefix_id is None:
            raise EvaluationError(
                "the tokenizer has neither a beginning- nor an end-of-text token, which begins a text without context; "
                "name one in its tokenizer_config.json"
            )
        self._prefix_id = prefix_id

    @property
    def eot_token_id(self) -> int:
        """Id that ends a text; of a tokenizer without one, that which begins it."""
        return self._prefix_id if self._eos_id is None else self._eos_id

    @property
    def prefix_token_id(self) -> int:
        """Id that begins a text without context."""
        return self._prefix_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the ids of a text."""
        return self._encoder.encode(string, add_special_tokens=add_special_tokens is not False).ids

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return log-probability and greedy flag of each continuation after its context; no bar on every rank."""
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(self, requests: Any, **kwargs: Any) -> list[tuple[float, bool]]:
        encoded = [ScoreRequest(context=tuple(context), continuation=tuple(ids)) for _, context, ids in requests]
        return [(score.log_prob, score.is_greedy) for score in self._score(encoded)]

    def _score(self, requests: list[ScoreRequest]) -> list[Score]:
        self.quiet.close()
        return score_requests(self._scorer, requests, self._shape, on_batch=self.on_batch)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each whole text, in windows that do not overlap."""
        windows: list[ScoreRequest] = []
        owners: list[int] = []
        for index, instance in enumerate(requests):
            for pair in utils.get_rolling_token_windows(
                token_list=self.tok_encode(instance.args[0]),
                prefix_token=self._prefix_id,
                max_seq_len=self._shape.seq_len,
                context_len=1,
            ):
                context, continuation = utils.make_disjoint_window(pair)
                windows.append(ScoreRequest(context=tuple(context), continuation=tuple(continuation)))
                owners.append(index)
        totals = [0.0] * len(requests)
        for owner, score in zip(owners, self._score(windows), strict=True):
            totals[owner] += score.log_prob
        return totals

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Return the text generated after each context, up to its first stop string; longest contexts first."""
        self.quiet.close()
        found = [""] * len(requests)
        groups: dict[str, list[tuple[int, list[int], dict[str, Any]]]] = {}
        for index, instance in enumerate(requests):
            context, given = instance.args
            options: dict[str, Any] = {**normalize_gen_kwargs(given, DEFAULT_MAX_NEW_TOKENS)}
            room = self._shape.seq_len - options["max_gen_toks"]
            if room < 1:
                raise EvaluationError(
                    f"a task asks for {options['max_gen_toks']} new tokens, and the model has a length of "
                    f"{self._shape.seq_len}; raise --seq-len, or leave the task out"
                )
            ids = (self.tok_encode(context) or [self._prefix_id])[-room:]
            groups.setdefault(repr(sorted(options.items(), key=str)), []).append((index, ids, options))
        done = 0
        for group in groups.values():
            group.sort(key=lambda one: len(one[1]), reverse=True)
            for first in range(0, len(group), self._shape.micro_batch_size):
                batch = group[first : first + self._shape.micro_batch_size]
                texts = self._generate([index for index, _, _ in batch], [ids for _, ids, _ in batch], batch[0][2])
                for (index, _, _), text in zip(batch, texts, strict=True):
                    found[index] = text
                done += len(batch)
                self.on_batch(done, len(requests))
        return found

    def _generate(self, seeds: list[int], prompts: list[list[int]], options: Mapping[str, Any]) -> list[str]:
        """Return the texts of prompts with the same options."""
        from lt_model import generate_batch

        assert self._generator is not None, "load_tasks refuses tasks that generate where nothing can"
        stops = [stop for stop in options.get("until") or [] if stop]

        def is_finished(row: int, new_ids: list[int]) -> bool:
            if new_ids[-1] == self._eos_id or len(new_ids) % TOKENS_BETWEEN_STOPS:
                return new_ids[-1] == self._eos_id
            return any(stop in self._encoder.decode(new_ids) for stop in stops)

        texts = []
        for new_ids in generate_batch(
            self._generator.model,
            prompts,
            max_new_tokens=options["max_gen_toks"],
            temperature=float(options.get("temperature") or 0.0) if options.get("do_sample") else 0.0,
            top_k=int(options.get("top_k") or 0),
            top_p=float(options.get("top_p") or 1.0),
            seeds=seeds,
            is_finished=is_finished,
        ):
            text = self._encoder.decode(new_ids)
            for stop in stops:
                text = text.split(stop)[0]
            texts.append(text)
        return texts
