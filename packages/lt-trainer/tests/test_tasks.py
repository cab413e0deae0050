"""Tasks from files and generated ones: requests, packed rows, metrics, and every refusal of a file."""

import json
import math
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lt_data import TokenStore
from lt_model import LlamaConfig
from lt_trainer.config.recipe import from_dict
from lt_trainer.engine import StepBatch, Topology, World
from lt_trainer.evaluation.encoding import PairEncoder
from lt_trainer.evaluation.generated_tasks import GENERATED_TASKS
from lt_trainer.evaluation.position_scores import PositionScores
from lt_trainer.evaluation.requests import ScoreRequest, check_requests, score_requests
from lt_trainer.evaluation.scorer import BatchShape, EvaluationError
from lt_trainer.evaluation.tasks import EncodedTask, evaluate_task, find_tasks

SEQ_LEN = 24
CONFIG = LlamaConfig(
    vocab_size=300, hidden_size=8, intermediate_size=8, n_heads=1, n_kv_heads=1, n_layers=1, max_position_embeddings=32
)
SHAPES = {
    "packed": BatchShape(micro_batch_size=2, seq_len=SEQ_LEN),
    "one-row": BatchShape(micro_batch_size=1, seq_len=SEQ_LEN),
    "no-mask": BatchShape(micro_batch_size=3, seq_len=SEQ_LEN, document_mask=False),
}


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
        starts = set(batch.cu_seqlens[0].tolist())
        total = 0
        for i in range(ids.size):
            if i in starts:
                total = 0
                assert positions[i] == 0
            total = total * 3 + int(ids[i]) + 1
            log_probs[i], is_greedy[i] = expected(total, int(labels[i]))
        return PositionScores.at_positions(batch, np.arange(ids.size), log_probs, is_greedy)


def expected(total: int, label: int) -> tuple[float, bool]:
    mixed = (total * 7919 + label * 104729) % 1009
    return -1.0 - mixed / 1009, mixed % 3 > 0


def score_alone(request: ScoreRequest) -> tuple[float, bool]:
    """The score by the definition, of the last SEQ_LEN + 1 tokens."""
    tokens = (*request.context, *request.continuation)[-(SEQ_LEN + 1) :]
    log_prob, greedy, total = 0.0, True, 0
    for i, (token, label) in enumerate(pairwise(tokens)):
        total = total * 3 + token + 1
        if i >= len(tokens) - 1 - len(request.continuation):
            one, is_greedy = expected(total, label)
            log_prob, greedy = log_prob + one, greedy and is_greedy
    return log_prob, greedy


def random_requests(count: int) -> list[ScoreRequest]:
    """Requests of 2 to 40 tokens: some are longer than a row, some fill it."""
    rng = np.random.default_rng(3)
    lengths = [(int(rng.integers(1, 32)), int(rng.integers(1, 8))) for _ in range(count)] + [(1, 24), (20, 5), (1, 1)]
    return [
        ScoreRequest(
            context=tuple(rng.integers(0, 9, n).tolist()),  # numpy's integers are no JSON
            continuation=tuple(rng.integers(0, 9, k).tolist()),
        )
        for n, k in lengths
    ]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dp_size", [1, 3])
def test_requests_have_the_scores_of_each_alone(shape: BatchShape, dp_size: int) -> None:
    requests = random_requests(40)
    check_requests(requests, shape, "these")
    sent: list[Any] = []
    scorers = [PairScorer(rank, dp_size, lambda value: sent.append(value) or [value]) for rank in range(dp_size)]
    for scorer in scorers:
        with suppress(AssertionError):  # one of several ranks alone has only a part of the requests
            score_requests(scorer, requests, shape)
    found = score_requests(PairScorer(0, dp_size, lambda value: sent), requests, shape)
    for request, score in zip(requests, found, strict=True):
        log_prob, is_greedy = score_alone(request)
        assert score.log_prob == pytest.approx(log_prob, rel=1e-12)
        assert score.is_greedy == is_greedy
    assert len({scorer.calls for scorer in scorers}) == 1, "equally many calls on every rank"
    assert len({frozenset(scorer.shapes) for scorer in scorers}) == 1
    assert len(scorers[0].shapes) == 2, "one shape of rows, one of boundaries"
    if shape.document_mask:
        assert scorers[0].calls * shape.micro_batch_size * dp_size < len(requests), "rows are shared"


def test_what_cannot_be_scored_is_refused() -> None:
    too_long = ScoreRequest(context=(1,), continuation=(1,) * 25)
    with pytest.raises(EvaluationError, match="these: the continuation of request 1 has 25 tokens, and rows have 24"):
        check_requests([ScoreRequest(context=(1,), continuation=(2,)), too_long], SHAPES["packed"], "these")
    with pytest.raises(EvaluationError, match="request 0 has no tokens to score"):
        check_requests([ScoreRequest(context=(1,), continuation=())], SHAPES["packed"], "these")


@pytest.fixture
def encoder(little_data: Path) -> PairEncoder:
    return PairEncoder(TokenStore.open(little_data / "validation").tokenizer())


def test_spaces_between_context_and_continuation_belong_to_the_continuation(encoder: PairEncoder) -> None:
    found = encoder.request("alpha beta ", "gamma")
    assert found == encoder.request("alpha beta", " gamma")
    assert encoder.decode([*found.context, *found.continuation]) == "alpha beta gamma"
    alone = encoder.request("", "gamma")
    assert alone.context == (encoder.prefix_id,)
    assert encoder.decode(list(alone.continuation)) == "gamma"


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_metrics_are_those_of_the_items(tmp_path: Path, encoder: PairEncoder) -> None:
    """Every score and both accuracies of each item by hand, from scores of each choice alone."""
    words = ["alpha", "beta", "gamma delta", "epsilon zeta eta"]
    items = [
        {"context": f"theta {i} iota", "choices": [f" {word}" for word in words], "label": i % 4} for i in range(30)
    ]
    write(tmp_path / "choice.jsonl", *items)
    write(tmp_path / "cloze.jsonl", *({"context": f"{i} and", "target": f" {words[i % 2]}"} for i in range(20)))
    choice, cloze = find_tasks(["choice", "cloze"], tmp_path)
    shape = SHAPES["packed"]
    found = evaluate_task(PairScorer(), EncodedTask.encode(choice, encoder, shape), shape)
    right = right_norm = 0
    for record, item in zip(found.items, items, strict=True):
        scores = [score_alone(encoder.request(item["context"], one)) for one in item["choices"]]
        assert record["log_probs"] == pytest.approx([log_prob for log_prob, _ in scores])
        assert record["is_greedy"] == [is_greedy for _, is_greedy in scores]
        right += int(np.argmax([s for s, _ in scores])) == item["label"]
        norms = [s / len(one) for (s, _), one in zip(scores, item["choices"], strict=True)]
        right_norm += int(np.argmax(norms)) == item["label"]
    assert found.metrics["acc"] == pytest.approx(right / 30)
    assert found.metrics["acc_norm"] == pytest.approx(right_norm / 30)
    assert 0 < right < 30
    assert right != right_norm
    share = right / 30
    assert found.metrics["acc_stderr"] == pytest.approx(math.sqrt(share * (1 - share) / 29))
    found = evaluate_task(PairScorer(), EncodedTask.encode(cloze, encoder, shape), shape)
    scores = [score_alone(encoder.request(f"{i} and", f" {words[i % 2]}")) for i in range(20)]
    assert found.metrics["acc"] == pytest.approx(sum(is_greedy for _, is_greedy in scores) / 20)
    assert found.metrics["perplexity"] == pytest.approx(math.exp(-sum(s for s, _ in scores) / 20))
    assert "acc_norm" not in found.metrics
    assert [task.items for task in find_tasks(["choice"], tmp_path, limit=7)] == [choice.items[:7]]


def test_a_model_that_has_diverged_is_right_nowhere(tmp_path: Path, encoder: PairEncoder) -> None:
    class Diverged(PairScorer):
        def score(self, batch: StepBatch) -> PositionScores:
            scores = super().score(batch)
            scores.log_probs[:] = math.nan
            return scores

    write(tmp_path / "one.jsonl", *({"context": "alpha", "choices": [" a", " b"], "label": 0} for _ in range(3)))
    (task,) = find_tasks(["one"], tmp_path)
    encoded = EncodedTask.encode(task, encoder, SHAPES["packed"])
    assert evaluate_task(Diverged(), encoded, SHAPES["packed"]).metrics["acc"] == 0.0


@pytest.mark.parametrize("name", GENERATED_TASKS)
def test_generated_tasks_are_the_same_each_time_and_their_labels_are_spread(name: str, encoder: PairEncoder) -> None:
    ((task,), (again,)) = (find_tasks([name], "") for _ in range(2))
    assert task == again
    assert len({(item.context, item.choices) for item in task.items}) > 190
    if not task.is_cloze:
        counts = np.bincount([item.label or 0 for item in task.items], minlength=4)
        assert counts.min() > 30
    EncodedTask.encode(task, encoder, BatchShape(micro_batch_size=1, seq_len=64))


def test_the_fake_engine_is_a_scorer(fake_engine, encoder: PairEncoder) -> None:
    engine = fake_engine.open(from_dict({"data": {"store": "unused"}}), CONFIG, World())
    shape = BatchShape(micro_batch_size=2, seq_len=64)
    (task,) = find_tasks(["lt_count"], "", limit=10)
    progress: list[tuple[int, int]] = []
    encoded = EncodedTask.encode(task, encoder, shape)
    result = evaluate_task(engine, encoded, shape, on_batch=lambda *numbers: progress.append(numbers))
    assert result.n_items == 10
    assert progress == [(i + 1, len(progress)) for i in range(len(progress))]


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ("", "has no items"),
        ("{", "task.jsonl:1: not JSON"),
        ("[1]", "task.jsonl:1: no text in the field context"),
        ('{"context": 3, "target": "a"}', "task.jsonl:1: no text in the field context"),
        ('{"context": "", "target": ""}', "task.jsonl:1: a choice or target is not a text, or is empty"),
        (
            '{"context": "", "target": "a"}\n{"context": "", "choices": ["a", "b"], "label": 1}',
            ":2: a cloze among",
        ),
        ('{"context": "", "choices": ["a"], "label": 0}', "is not a list of at least two texts"),
        ('{"context": "", "choices": ["a", "b"], "label": 2}', "label = 2 is not an index in 2 choices"),
        ('{"context": "", "choices": ["a", "b"], "label": true}', "label = True is not an index"),
        ('{"context": "", "choices": ["a", 5], "label": 0}', "a choice or target is not a text"),
    ],
)
def test_a_file_that_is_no_task_is_refused_with_the_line(tmp_path: Path, lines: str, problem: str) -> None:
    (tmp_path / "task.jsonl").write_text(lines)
    with pytest.raises(EvaluationError, match=problem):
        find_tasks(["task"], tmp_path)


@pytest.mark.parametrize("name", ["", "../mine", "a/b", ".hidden"])
def test_a_name_that_is_no_file_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(EvaluationError, match="must have letters, digits"):
        find_tasks([name], tmp_path)


def test_an_unknown_task_is_refused_with_those_that_exist(tmp_path: Path) -> None:
    write(tmp_path / "mine.jsonl", {"context": "", "target": "a"})
    with pytest.raises(EvaluationError, match=r"task 'hellaswag': no such task in .*; have mine, lt_copy, lt_count"):
        find_tasks(["hellaswag"], tmp_path)
