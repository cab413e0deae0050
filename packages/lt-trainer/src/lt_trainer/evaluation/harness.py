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

from lt_data import Tokenizer
from lt_trainer.evaluation.requests import ScoreRequest, score_requests
from lt_trainer.evaluation.scorer import BatchShape, EvaluationError, Scorer, TaskResult

try:
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.evaluator import evaluate
    from lm_eval.models.utils import Collator, normalize_gen_kwargs
    from lm_eval.tasks import TaskManager
except ModuleNotFoundError as exc:
    raise EvaluationError("tasks need lm-evaluation-harness; pip install 'lt-trainer[eval]'") from exc

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
    manager = TaskManager(include_path=str(include_path), include_defaults=False)
    if not set(manager.all_tasks).issuperset(names):
        manager = TaskManager(include_path=str(include_path) or None)
    try:
        loaded = manager.load(list(names))
    except KeyError as exc:
        raise EvaluationError(f"{exc.args[0]}; lm-eval ls tasks lists them") from exc
    for name, task in loaded["tasks"].items():
        if task.OUTPUT_TYPE == "generate_until" and not may_generate:
            raise EvaluationError(
                f"task {name!r} asks for generated text, which a run cannot make; evaluate it with lt train evaluate"
            )
        if num_fewshot is not None and task.get_config("num_fewshot") != 0:  # whose own 0 stays, as in the harness
            task.set_config(key="num_fewshot", value=num_fewshot)
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
        items = [{key: value for key, value in one.items() if key not in LEFT_OUT} for one in samples]
        result = TaskResult(
            task=name,
            n_items=found["n-samples"].get(name, {}).get("effective", 0),
            metrics=_numbers(metrics, samples),
            items=json.loads(json.dumps(items, default=str)),  # documents have values of any kind
        )
        results.append(result)
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
        self.quiet.close()
        encoded: list[ScoreRequest] = [(context, continuation) for _, context, continuation in requests]
        return score_requests(self._scorer, encoded, self._shape, on_batch=self.on_batch)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each whole text, in windows that do not overlap."""
        texts = [
            utils.get_rolling_token_windows(
                token_list=self.tok_encode(one.args[0]),
                prefix_token=self._prefix_id,
                max_seq_len=self._shape.seq_len,
                context_len=1,
            )
            for one in requests
        ]
        windows = [[("", *utils.make_disjoint_window(pair)) for pair in text] for text in texts]
        scores = iter(self._loglikelihood_tokens([one for text in windows for one in text]))
        return [sum(next(scores)[0] for _ in text) for text in windows]

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Return the text generated after each context, up to its first stop string; longest contexts first."""
        from lt_model import generate_batch

        assert self._generator is not None, "load_tasks refuses tasks that generate where nothing can"
        self.quiet.close()
        numbered = [(index, self.tok_encode(one.args[0]), one.args[1]) for index, one in enumerate(requests)]
        order = Collator(numbered, lambda one: -len(one[1]), group_by="gen_kwargs", group_fn=lambda one: one[2])
        texts: list[str] = []
        for batch in order.get_batched(self._shape.micro_batch_size):
            options: dict[str, Any] = {**normalize_gen_kwargs(batch[0][2], DEFAULT_MAX_NEW_TOKENS)}
            room, stops = self._shape.seq_len - options["max_gen_toks"], [s for s in options.get("until") or [] if s]
            if room < 1:
                raise EvaluationError(
                    f"a task asks for {options['max_gen_toks']} new tokens, and the model has a length of "
                    f"{self._shape.seq_len}; raise --seq-len, or leave the task out"
                )

            def is_finished(row: int, new_ids: list[int], stops: Sequence[str] = stops) -> bool:
                if new_ids[-1] == self._eos_id or len(new_ids) % TOKENS_BETWEEN_STOPS:
                    return new_ids[-1] == self._eos_id
                return any(stop in self._encoder.decode(new_ids) for stop in stops)

            for new_ids in generate_batch(
                self._generator.model,
                [(ids or [self._prefix_id])[-room:] for _, ids, _ in batch],
                max_new_tokens=options["max_gen_toks"],
                temperature=float(options.get("temperature") or 0.0) if options.get("do_sample") else 0.0,
                top_k=int(options.get("top_k") or 0),
                top_p=float(options.get("top_p") or 1.0),
                seeds=[index for index, _, _ in batch],
                is_finished=is_finished,
            ):
                text = self._encoder.decode(new_ids)
                texts.append(min((text.split(stop)[0] for stop in stops), key=len, default=text))
            self.on_batch(len(texts), len(requests))
        return order.get_original(texts)
