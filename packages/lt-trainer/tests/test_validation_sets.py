"""Validation sets: the same rows at each interval and over any number of ranks, with bits per byte of their text."""

import math
import shutil
from pathlib import Path

import numpy as np
import pytest

import lt_data
from lt_data import RowReader, TokenStore, open_pack, pack
from lt_data.sources.reader import read_documents
from lt_test_helpers.runs import run
from lt_trainer.config.recipe import load
from lt_trainer.data.training_data import open_data, validation_batches
from lt_trainer.engine import Topology
from lt_trainer.errors import RecipeError
from lt_trainer.observability.inspection import inspect_step
from lt_trainer.run_directory.jsonl import read_jsonl


def start(base, *overrides: str, **options) -> int:
    return run(load(base=base, overrides=["run.engine=fake", *overrides]), environ={}, **options)


def validations(base) -> list[dict]:
    return [r for r in read_jsonl(Path(base["run"]["dir"]) / "metrics.jsonl") if "val_loss" in r]


def valid_tokens(folder: Path) -> int:
    store = TokenStore(folder)
    return int(RowReader(store, open_pack(store, seq_len=32)).valid.sum())


def test_each_set_is_evaluated_whole_at_each_interval(recipe_base, fake_engine, little_data) -> None:
    stores = {"web": little_data / "train", "again": little_data / "validation"}
    recipe_base["data"]["validation_sets"] = {name: {"store": str(store)} for name, store in stores.items()}
    assert start(recipe_base, "metrics.validation_interval=8", "metrics.validation_tokens=-1") == 0
    found = validations(recipe_base)
    assert [(r["step"], r.get("val_set", "")) for r in found] == [
        (step, name) for step in (8, 16, 20) for name in ("", "again", "web")
    ]
    for record in found:
        store = TokenStore(stores[record.get("val_set", "again")])
        assert record["val_tokens"] == valid_tokens(store.path)
        bits = record["val_loss"] * record["val_tokens"] / math.log(2)
        assert record["val_perplexity"] == math.exp(record["val_loss"])
        assert record["val_bits_per_byte"] == pytest.approx(bits / store.manifest.text_bytes, rel=1e-15)
    recipe_base["data"] |= {"validation": ""}
    recipe_base["run"]["dir"] += "-named"
    assert start(recipe_base, "metrics.validation_interval=0") == 0
    assert [(r["step"], r["val_set"]) for r in validations(recipe_base)] == [(20, "again"), (20, "web")]


@pytest.mark.parametrize("dp_size", [1, 2, 3, 7])
@pytest.mark.parametrize("micro_batch_size", [1, 4])
@pytest.mark.parametrize("tokens", [-1, 200])
def test_every_row_once_over_any_number_of_ranks(recipe_base, dp_size: int, micro_batch_size: int, tokens: int) -> None:
    (dataset,) = open_data(load(base=recipe_base, overrides=[f"metrics.validation_tokens={tokens}"]).recipe).validation
    reader = dataset.reader
    assert dataset.rows.size == (7 if tokens > 0 else reader.n_rows), "200 positions are in 7 rows of 32"
    rounds, seen = list[int](), list[bytes]()
    for rank in range(dp_size):
        topology = Topology(rank=rank, world_size=dp_size, dp_rank=rank, dp_size=dp_size)
        batches = list(validation_batches(reader, topology, micro_batch_size, dataset.rows))
        rounds.append(len(batches))
        for batch in batches:
            assert batch.valid_tokens == int((batch.labels != -100).sum())
            documents = batch.doc_ids.reshape(-1)
            begins = (np.arange(documents.size) % 32 == 0) | (documents != np.roll(documents, 1))
            assert sorted({*batch.cu_seqlens[0].tolist()}) == [*np.flatnonzero(begins).tolist(), documents.size]
            used = (batch.doc_ids >= 0).any(axis=2)
            assert (batch.labels[~used] == -100).all()
            seen += [row.tobytes() for row in np.stack([batch.input_ids, batch.labels], axis=-1)[used]]
    everything = reader.read_rows(dataset.rows)
    expected = np.stack([everything.input_ids, everything.labels], axis=-1).astype(np.int32)
    assert sorted(seen) == sorted(row.tobytes() for row in expected)
    assert len(set(rounds)) == 1, "a rank with fewer batches would leave the others waiting"


def test_a_part_of_a_set_takes_a_tenth_of_the_run_and_is_the_same_in_all_runs(
    recipe_base, fake_engine, little_data
) -> None:
    """20 steps of 8 rows: 16 rows at the end, 8 after each 10 steps; a larger part has the smaller."""
    recipe_base["data"]["validation"] = str(little_data / "train")

    def rows(*overrides: str) -> list[int]:
        (dataset,) = open_data(load(base=recipe_base, overrides=overrides).recipe).validation
        share = dataset.reader.count_labels(dataset.rows) / valid_tokens(little_data / "train")
        assert dataset.text_bytes == round(share * TokenStore(little_data / "train").manifest.text_bytes)
        assert dataset.rows.tolist() == sorted(set(dataset.rows.tolist()))
        return dataset.rows.tolist()

    whole = rows("metrics.validation_tokens=-1")
    assert len(rows()) == 16 < len(whole)
    assert rows("metrics.validation_tokens=512", "run.seed=7", "batch.micro_batch_size=2") == rows()
    twice = "metrics.validation_interval=10"
    assert len(rows(twice)) == 8
    assert set(rows(twice)) < set(rows()) < set(whole)
    assert rows("metrics.validation_tokens=1000000") == whole == list(range(len(whole)))
    assert start(recipe_base, twice) == 0
    (dataset,) = open_data(load(base=recipe_base, overrides=[twice]).recipe).validation
    assert [r["val_tokens"] for r in validations(recipe_base)] == [dataset.reader.count_labels(dataset.rows)] * 2


def test_a_set_of_ids_is_decoded_for_its_bytes_and_one_of_another_tokenizer_refused(
    recipe_base, little_data, tmp_path
) -> None:
    folder, whole = little_data / "text-validation", TokenStore(little_data / "validation")
    texts = [document.as_text() for document in read_documents([folder])]
    ids = (whole[i].astype(np.int64) for i in range(whole.n_documents))
    documents = [lt_data.Document(ids=one, source=str(i)) for i, one in enumerate(ids)]
    lt_data.prepare(documents, tokenizer=whole.tokenizer(), out=tmp_path / "ids")
    pack(TokenStore(tmp_path / "ids"), seq_len=32)
    recipe_base["data"]["validation"] = str(tmp_path / "ids")
    (found,) = open_data(load(base=recipe_base).recipe).validation
    assert found.text_bytes == sum(len(text.encode()) for text in texts) > 0
    lt_data.prepare([folder], tokenizer=lt_data.Tokenizer.train(texts, vocab_size=280), out=tmp_path / "other")
    recipe_base["data"]["validation_sets"] = {"web": {"store": str(tmp_path / "other")}}
    with pytest.raises(RecipeError, match=r"data\.validation_sets\.web\.store = .* another tokenizer"):
        open_data(load(base=recipe_base).recipe)


def test_packs_may_be_outside_of_the_stores(recipe_base, fake_engine, little_data, tmp_path: Path) -> None:
    for name in ("train", "validation"):
        folder = shutil.copytree(little_data / name, tmp_path / name, ignore=shutil.ignore_patterns("packs"))
        (folder / "packs").touch()  # nothing can be written there
        store = TokenStore(folder, packs=tmp_path / "packs")
        pack(store, seq_len=recipe_base["data"]["seq_len"], mode="bfd")
    recipe_base["data"] |= {"store": str(tmp_path / "train"), "validation": str(tmp_path / "validation")}
    recipe_base["data"]["packs"] = str(tmp_path / "packs")
    assert start(recipe_base) == 0
    assert inspect_step(Path(recipe_base["run"]["dir"]), 1).rows
