"""Losses of a store by source and length are the same from one rank and from every kind of layout, in float64."""

import os
from dataclasses import replace

import numpy as np
import pytest

from lt_data import Document, RowReader, TokenStore, open_pack, pack, prepare_documents, train_bpe
from lt_trainer.config.recipe import llama_config, load
from lt_trainer.engine import World
from lt_trainer.evaluation import BatchShape, GroupLoss, evaluate_store
from lt_trainer_gpu.spec import SPEC

SEQ_LEN, MICRO_BATCH_SIZE = 32, 2
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "fsdp": (2, ()),
    "tp-sp": (2, ("parallel.tp=2", "parallel.sequence_parallel=true")),
    "cp": (2, ("parallel.cp=2",)),
    "pp-fsdp": (4, ("parallel.pp=2",)),
}


def evaluated(folder: str, sets: tuple[str, ...]) -> list[GroupLoss]:
    """In a rank: the losses of the store."""
    base = {
        "model": {"hidden_size": 32, "intermediate_size": 48, "n_heads": 4, "n_kv_heads": 2, "n_layers": 2},
        "data": {"store": folder, "seq_len": SEQ_LEN},
        "batch": {"global_batch_size": 8, "micro_batch_size": MICRO_BATCH_SIZE},
        "schedule": {"max_steps": 1, "warmup_steps": 0},
        "engine": {"gpu": {"device": "cpu", "dtype": "float64"}},
    }
    recipe, world, store = load(base=base, overrides=sets).recipe, World.from_env(os.environ), TokenStore.open(folder)
    SPEC.check(recipe, world)
    engine = SPEC.open(recipe, llama_config(recipe, store.vocab_size), world)
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
    tokenizer = train_bpe((str(d.text) for d in documents), vocab_size=280)
    prepare_documents(documents, tokenizer=tokenizer, out=folder)
    pack(TokenStore.open(folder), seq_len=SEQ_LEN)
    return str(folder)


@pytest.fixture(scope="module")
def alone(ranks, store: str) -> list[GroupLoss]:
    (losses,) = ranks.run(evaluated, store, ("engine.gpu.attention=reference",), ranks=1)
    return losses


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_has_the_losses_of_one_rank(ranks, store: str, alone: list[GroupLoss], name: str) -> None:
    n, sets = LAYOUTS[name]
    assert {loss.group for loss in alone} >= {"all", "length"}
    for found in ranks.run(evaluated, store, sets, ranks=n):
        assert [loss.loss_sum for loss in found] == pytest.approx([loss.loss_sum for loss in alone], rel=1e-11)
        assert [replace(loss, loss_sum=0.0) for loss in found] == [replace(loss, loss_sum=0.0) for loss in alone]
