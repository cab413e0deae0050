"""Scores of requests against the definition, and tasks of lm-evaluation-harness: scores, metrics, refusals.

The documents of tasks are made here, without a network; whole texts are longer than a row.
"""

import datetime
import math
import random
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lt_test_helpers.harness_tasks import write_task
from lt_trainer.engine import StepBatch, Topology
from lt_trainer.evaluation.position_scores import PositionScores
from lt_trainer.evaluation.requests import ScoreRequest, score_requests
from lt_trainer.evaluation.scorer import BatchShape, EvaluationError

torch = pytest.importorskip("torch")
pytest.importorskip("lm_eval", reason="LM_EVAL: lm-evaluation-harness is not installed (extra eval)")

from lt_model import generate  # noqa: E402
from lt_trainer.cli.evaluate import evaluate  # noqa: E402
from lt_trainer.evaluation.harness import HarnessModel, load_tasks, run_tasks  # noqa: E402
from lt_trainer.evaluation.local_model import load_model  # noqa: E402
from lt_trainer.run_directory.jsonl import read_jsonl  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")  # those of the harness and its libraries are theirs

SEQ_LEN, N_ITEMS = 24, 20


class PairScorer:
    """A model whose log-probability of a label depends on all tokens of its document up to there, exactly."""

    def __init__(self, dp_rank: int = 0, dp_size: int = 1, gathered: Any = None) -> None:
        self.topology = Topology(rank=dp_rank, world_size=dp_size, dp_rank=dp_rank, dp_size=dp_size)
        self.control: Any = type("Control", (), {"all_gather": staticmethod(gathered or (lambda value: [value]))})
        self.shapes: set[tuple[int, ...]] = set()
        self.calls = 0

    def score(self, batch: StepBatch) -> PositionScores:
        self.calls += 1
        self.shapes |= {batch.labels.shape, batch.cu_seqlens.shape}
        log_probs, is_greedy = np.zeros(batch.labels.size), np.zeros(batch.labels.size, bool)
        ids, labels, positions = (a.ravel() for a in (batch.input_ids, batch.labels, batch.position_ids))
        total = 0
        for i in range(ids.size):
            if i in batch.cu_seqlens[0]:
                total = 0
                assert positions[i] == 0
            total = total * 3 + int(ids[i]) + 1
            log_probs[i], is_greedy[i] = expected(total, int(labels[i]))
        return PositionScores.at_positions(batch.labels, np.arange(ids.size), log_probs, is_greedy)


def expected(total: int, label: int) -> tuple[float, bool]:
    mixed = (total * 7919 + label * 104729) % 1009
    return -1.0 - mixed / 1009, mixed % 3 > 0


def score_alone(request: ScoreRequest) -> tuple[float, bool]:
    """The score by the definition, of the last SEQ_LEN + 1 tokens."""
    tokens = (*request[0], *request[1])[-(SEQ_LEN + 1) :]
    log_prob, greedy, total = 0.0, True, 0
    for i, (token, label) in enumerate(pairwise(tokens)):
        total = total * 3 + token + 1
        if i >= len(tokens) - 1 - len(request[1]):
            one, is_greedy = expected(total, label)
            log_prob, greedy = log_prob + one, greedy and is_greedy
    return log_prob, greedy


@pytest.mark.parametrize("document_mask", [True, False])
@pytest.mark.parametrize("dp_size", [1, 3])
def test_requests_have_the_scores_of_each_alone(document_mask: bool, dp_size: int) -> None:
    """Requests of 2 to 40 tokens: some are longer than a row, some fill it."""
    rng = np.random.default_rng(3)
    lengths = [*zip(rng.integers(1, 32, 40), rng.integers(1, 8, 40), strict=True), (1, 24), (20, 5), (1, 1)]
    requests = [(rng.integers(0, 9, n).tolist(), rng.integers(0, 9, k).tolist()) for n, k in lengths]
    shape = BatchShape(micro_batch_size=2, seq_len=SEQ_LEN, document_mask=document_mask)
    sent: list[Any] = []
    scorers = [PairScorer(rank, dp_size, lambda value: sent.append(value) or [value]) for rank in range(dp_size)]
    for scorer in scorers:
        with suppress(AssertionError):  # one of several ranks alone has only a part of the requests
            score_requests(scorer, requests, shape)
    found = score_requests(PairScorer(0, dp_size, lambda value: sent), requests, shape)
    for request, score in zip(requests, found, strict=True):
        log_prob, is_greedy = score_alone(request)
        assert score == (pytest.approx(log_prob, rel=1e-12), is_greedy)
    assert len({(scorer.calls, *sorted(scorer.shapes)) for scorer in scorers}) == 1, "equal calls on every rank"
    assert len(scorers[0].shapes) == 2, "one shape of rows, one of boundaries"
    assert document_mask is (scorers[0].calls * shape.micro_batch_size * dp_size < len(requests)), "rows are shared"
    with pytest.raises(EvaluationError, match="text 0 of a task has 1 tokens to condition on and 25 to score"):
        score_requests(PairScorer(), [([1], [1] * 25)], shape)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, little_data: Path) -> Path:
    """Task files of the harness, with their documents."""
    folder, rng = tmp_path_factory.mktemp("harness"), random.Random(0)
    texts = [path.read_text() for path in sorted((little_data / "text-validation").iterdir())]
    words = texts[0].split()

    def item(**fields: Any) -> dict[str, Any]:
        return {"context": " ".join(rng.sample(words, 6)), **fields}

    choices = [[f" {w}" for w in rng.sample(words, 4)] for _ in range(N_ITEMS)]
    write_task(folder, "choice", [item(choices=given, label=i % 4) for i, given in enumerate(choices)])
    write_task(folder, "cloze", [item(target=f" {rng.choice(words)}") for _ in range(N_ITEMS)])
    write_task(folder, "texts", [{"context": "", "text": text} for text in [*texts, "alpha", " ".join(words * 9)]])
    contexts = [" ".join(word for _ in range(n) for word in rng.sample(words, 6)) for n in (1, 1, 1, 3, 3, 3)]
    write_task(folder, "generation", [{"context": context, "answer": "x"} for context in contexts])
    (folder / "all.yaml").write_text("group: all_of_it\ntask: [choice, cloze]\naggregate_metric_list: [{metric: acc}]")
    return folder


@pytest.fixture(scope="module")
def harness(model: Path) -> HarnessModel:
    """The model as the harness calls it, in float32."""
    loaded = load_model(model)
    return HarnessModel(loaded, loaded.tokenizer, BatchShape(micro_batch_size=3, seq_len=64), generator=loaded)


def test_metrics_are_those_of_the_items_and_global_random_numbers_are_left_alone(
    harness: HarnessModel, folder: Path
) -> None:
    """A data set's columns may be of any kind; what is kept of an item is JSON. A run generates no text."""
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    tasks = load_tasks(["all_of_it"], include_path=folder)
    task = tasks["tasks"]["cloze"]
    task.dataset["test"] = [{**document, "day": datetime.date(2026, 1, 2)} for document in task.test_docs()]
    choice, cloze, group = run_tasks(harness, tasks)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    assert (choice.task, choice.n_items, len(choice.items)) == ("choice", N_ITEMS, N_ITEMS)
    for metric in ("acc", "acc_norm"):
        share = sum(item[metric] for item in choice.items) / N_ITEMS
        assert choice.metrics[metric] == pytest.approx(share)
        assert choice.metrics[f"{metric}_stderr"] == pytest.approx(math.sqrt(share * (1 - share) / (N_ITEMS - 1)))
    log_probs = [float(item["filtered_resps"][0][0]) for item in cloze.items]
    assert cloze.metrics["perplexity"] == pytest.approx(math.exp(-sum(log_probs) / len(log_probs)))
    assert "perplexity_stderr" not in cloze.metrics
    assert {item["doc"]["day"] for item in cloze.items} == {"2026-01-02"}
    assert group.metrics["acc"] == pytest.approx((choice.metrics["acc"] + cloze.metrics["acc"]) / 2)
    with pytest.raises(EvaluationError, match="task 'generation' asks for generated text, which a run cannot make"):
        load_tasks(["generation"], include_path=folder)


def test_the_command_keeps_metrics_and_items(model: Path, folder: Path, tmp_path: Path) -> None:
    lines: list[str] = []

    def again() -> int:
        options: dict[str, Any] = {"tasks": ["choice", "generation"], "include_path": folder, "limit": 5}
        evaluate(model, **options, seq_len=64, device="cpu", dtype="float32", out=tmp_path, echo=lines.append)
        return len(read_jsonl(tmp_path / "results.jsonl"))

    assert again() == 3
    first, second = read_jsonl(tmp_path / "results.jsonl")[1:]
    assert (first["kind"], first["name"], first["results"][0]["n_items"]) == ("task", "choice", 5)
    items = read_jsonl(tmp_path / "items" / "choice.jsonl")
    assert first["results"][0]["acc"] == pytest.approx(sum(item["acc"] for item in items) / 5)
    assert second["results"][0]["exact_match"] == 0.0
    assert f"acc {first['results'][0]['acc']:.4g} ± " in lines[0]
    assert again() == 3
    assert lines[:2] == lines[2:]
    with open(folder / "choice.jsonl", "a") as file:
        file.write((folder / "choice.jsonl").read_text().splitlines()[0] + "\n")
    assert again() == 5, "results of changed files do not count"


def test_whole_texts_and_generated_ones(model: Path, harness: HarnessModel, folder: Path) -> None:
    """A window has the row's length; the last one is filled with context from before it, which is not scored again."""
    loaded, row = load_model(model), 64
    tokenizer, tasks = loaded.tokenizer, load_tasks(["texts", "generation"], include_path=folder, may_generate=True)
    texts, generated = run_tasks(harness, tasks)
    for item in texts.items:
        ids = tokenizer.encode_batch([item["doc"]["text"]])[0].tolist()
        tokens, total = [harness.prefix_token_id, *ids], 0.0
        for first in range(0, len(ids), row):
            end = min(first + row, len(ids))
            with torch.no_grad():
                logits = loaded.model(torch.tensor([tokens[max(0, end - row) : end]]))[0, first - end :]
            total += float(logits.log_softmax(dim=-1).gather(1, torch.tensor(ids[first:end])[:, None]).sum())
        assert float(item["filtered_resps"][0]) == pytest.approx(total, rel=1e-5)
    assert len(texts.items) == 7
    assert len({len(tokenizer.encode_batch([item["doc"]["text"]])[0]) > row for item in texts.items}) == 2
    prompts = [tokenizer.encode_batch([item["doc"]["context"]])[0].tolist() for item in generated.items]
    assert {len(prompt) > row - 40 for prompt in prompts} == {True, False}, "some lose their beginning"
    for item, prompt in zip(generated.items, (ids[-(row - 40) :] for ids in prompts), strict=True):
        stops = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
        new_ids = generate(loaded.model, prompt, max_new_tokens=40, temperature=0, stop_token_ids=stops)
        text = tokenizer.decode(new_ids, skip_special_tokens=True)
        assert item["filtered_resps"] == [text.split(" a")[0].split("\n")[0]]
