"""Losses of a store by source and length are the same from every layout; scoring changes no bit of training."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lt_data import Document, RowReader, Tokenizer, TokenStore, open_pack, pack, prepare
from lt_test_helpers.harness_tasks import write_task
from lt_test_helpers.layouts import global_batches, open_engine, rank_batch
from lt_test_helpers.runs import run
from lt_trainer.config.recipe import load, model_config
from lt_trainer.engine import World
from lt_trainer.evaluation.scorer import BatchShape
from lt_trainer.evaluation.store_losses import evaluate_store
from lt_trainer.run_directory.jsonl import read_jsonl
from lt_trainer_gpu.spec import SPEC

SEQ_LEN, MICRO_BATCH_SIZE = 32, 2
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "fsdp": (2, ()),
    "tp-sp": (2, ("parallel.tp=2", "parallel.sequence_parallel=true")),
    "cp": (2, ("parallel.cp=2",)),
    "pp-fsdp": (4, ("parallel.pp=2",)),
}


def evaluated(folder: str, sets: tuple[str, ...]) -> list[dict[str, Any]]:
    """In a rank: the losses of the store."""
    base = {
        "model": {"hidden_size": 32, "intermediate_size": 48, "n_heads": 4, "n_kv_heads": 2, "n_layers": 2},
        "data": {"store": folder, "seq_len": SEQ_LEN},
        "batch": {"global_batch_size": 8, "micro_batch_size": MICRO_BATCH_SIZE},
        "schedule": {"max_steps": 1, "warmup_steps": 0},
        "engine": {"gpu": {"device": "cpu", "dtype": "float64"}},
    }
    recipe, world, store = load(base=base, overrides=sets).recipe, World.from_env(os.environ), TokenStore(folder)
    SPEC.check(recipe, world)
    engine = SPEC.open(recipe, model_config(recipe, store.vocab_size), world)
    reader = RowReader(store, open_pack(store, seq_len=SEQ_LEN))
    shape = BatchShape(micro_batch_size=MICRO_BATCH_SIZE, seq_len=SEQ_LEN)
    losses = evaluate_store(engine, reader, shape, name="held-out")
    engine.close()
    return losses


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store of two sources, with documents shorter and longer than a row."""
    folder, rng = tmp_path_factory.mktemp("store") / "held-out", np.random.default_rng(5)
    words = ["loss", "of", "a", "model", "falls", "when", "its", "data", "is", "read", "in", "order"]
    documents = [
        Document(text=" ".join(rng.choice(words, int(rng.integers(1, 90)))), source=f"source {i % 2}")
        for i in range(15)
    ]
    tokenizer = Tokenizer.train((str(d.text) for d in documents), vocab_size=280)
    prepare(documents, tokenizer=tokenizer, out=folder)
    pack(TokenStore(folder), seq_len=SEQ_LEN)
    return str(folder)


@pytest.fixture(scope="module")
def alone(ranks, store: str) -> list[dict[str, Any]]:
    (losses,) = ranks.run(evaluated, store, ("engine.gpu.attention=reference",), ranks=1)
    return losses


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_has_the_losses_of_one_rank(ranks, store: str, alone: list[dict[str, Any]], name: str) -> None:
    n, sets = LAYOUTS[name]
    assert {loss["group"] for loss in alone} >= {"all", "length"}
    for found in ranks.run(evaluated, store, sets, ranks=n):
        for ours, theirs in zip(found, alone, strict=True):
            close = {key: pytest.approx(x, rel=1e-11) if isinstance(x, float) else x for key, x in theirs.items()}
            assert ours == close


def trained(sets: tuple[str, ...], score: bool) -> list[tuple[float, float]]:
    """In a rank: losses and norms of four steps, with or without scores between them."""
    model = {"hidden_size": 32, "intermediate_size": 48, "n_heads": 4, "n_kv_heads": 2, "n_layers": 3}
    engine = open_engine(*sets, model=model, rows=8, seq_len=16, vocab=61, dtype="float32")
    found = []
    for batch in global_batches(4, rows=8, seq_len=16, vocab=61):
        mine = rank_batch(batch, engine, 2)
        if score:
            assert engine.score(mine).log_probs.min() <= 0
        found += engine.fetch_metrics([engine.step(mine, 1e-2)])
    engine.close()
    return [(metrics.loss, metrics.grad_norm) for metrics in found]


KEEP = "engine.gpu.reshard_after_forward=false"
TRAINED: dict[str, tuple[int, tuple[str, ...]]] = {
    "one": (1, ("engine.gpu.activation_checkpointing=full",)),
    "fsdp-keep": (2, (KEEP,)),
    "tp-sp": (2, ("parallel.tp=2", "parallel.sequence_parallel=true")),
    "pp": (2, ("parallel.pp=2",)),
}


@pytest.mark.parametrize("name", TRAINED)
def test_scoring_between_steps_changes_no_bit_of_training(ranks, name: str) -> None:
    n, sets = TRAINED[name]
    with_scores, without = (ranks.run(trained, sets, score, ranks=n) for score in (True, False))
    assert with_scores == without
    assert len(set(without[0])) == 4


def ran(store: str, folder: str, tasks_folder: str, sets: tuple[str, ...], evaluate: bool) -> int:
    """In a rank: a whole run, with or without tasks."""
    base = {
        "run": {"dir": folder},
        "model": {"hidden_size": 32, "intermediate_size": 48, "n_heads": 4, "n_kv_heads": 2, "n_layers": 2},
        "data": {"store": store, "validation": store, "seq_len": SEQ_LEN},
        "batch": {"global_batch_size": 8, "micro_batch_size": MICRO_BATCH_SIZE},
        "schedule": {"max_steps": 6, "warmup_steps": 1},
        "metrics": {"log_interval": 1, "monitor_interval_s": 0.0, "validation_tokens": -1},
        "engine": {"gpu": {"device": "cpu", "dtype": "float64"}},
    }
    tasks = {"tasks": ["choice", "cloze"], "include_path": tasks_folder, "interval": 3, "limit": 7, "stores": True}
    return run(load(base=base | ({"evaluation": tasks} if evaluate else {}), overrides=sets))


@pytest.mark.filterwarnings("default")  # of the harness and its libraries
def test_a_run_evaluates_tasks_on_its_shards_and_trains_the_same(ranks, store: str, tmp_path: Path) -> None:
    """Two ranks of each kind have the scores of one, and the losses that the run has without them."""
    kinds = {"one": (1, ()), "fsdp": (2, ()), "tp": (2, ("parallel.tp=2",)), "plain": (2, ("parallel.tp=2",))}
    losses, tasks, validated = {}, {}, {}
    words = ["loss", "model", "data", "order"]
    choice = [
        {"context": f"the {w} of", "choices": [f" {c}" for c in words], "label": i} for i in range(4) for w in words
    ]
    write_task(tmp_path / "tasks", "choice", choice)
    write_task(tmp_path / "tasks", "cloze", [{"context": f"{w} is", "target": f" {w}"} for w in words * 2])
    for name, (n, sets) in kinds.items():
        assert (
            ranks.run(ran, store, str(tmp_path / name), str(tmp_path / "tasks"), sets, name != "plain", ranks=n)
            == [0] * n
        )
        records = read_jsonl(tmp_path / name / "metrics.jsonl")
        losses[name] = [record["loss"] for record in records if "loss" in record]
        tasks[name] = [record for record in records if "eval_task" in record]
        validated[name] = [record["val_loss"] for record in records if "val_loss" in record]
    assert losses["tp"] == losses["plain"]
    assert tasks["plain"] == []
    evaluated = [(step, task) for step in (3, 6) for task in ("choice", "cloze", "validation")]
    assert [(record["step"], record["eval_task"]) for record in tasks["one"]] == evaluated
    for name in ("fsdp", "tp"):
        for found, wanted in zip(tasks[name], tasks["one"], strict=True):
            assert found.keys() == wanted.keys()
            assert "eval_loss" in found or "eval_acc" in found
            metrics = [key for key in found if key not in ("eval_task", "elapsed_s")]
            assert [found[key] for key in metrics] == pytest.approx([wanted[key] for key in metrics], rel=1e-9)
    for name in ("one", "fsdp", "tp"):
        assert tasks[name][-1]["eval_loss"] == pytest.approx(validated[name][-1], rel=1e-9)
    items = [read_jsonl(tmp_path / name / "evaluation/step-00000006/choice.jsonl") for name in ("one", "fsdp")]
    for one, other in zip(*items, strict=True):
        ours, theirs = ([float(log_prob) for log_prob, _ in item["filtered_resps"]] for item in (one, other))
        assert ours == pytest.approx(theirs, rel=1e-9)
