"""Mixtures, random rows, batches that grow; stops, ways back and `inspect_step` know of all of them."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lt_data import DataError, Mixture, Phase, RowReader, Stream, TokenStore, open_pack
from lt_test_helpers.layouts import whole_batch
from lt_test_helpers.runs import events, losses, start
from lt_trainer.config.recipe import load
from lt_trainer.data.batches import StreamBatches
from lt_trainer.data.document_boundaries import find_document_starts
from lt_trainer.data.synthetic import SyntheticRows
from lt_trainer.data.training_data import open_data, open_stream
from lt_trainer.engine import StepBatch, Topology
from lt_trainer.errors import RecipeError, RunDirError
from lt_trainer.observability.inspection import inspect_step
from lt_trainer.run_directory.jsonl import read_jsonl

Base = dict[str, dict[str, Any]]
IDS = [[934, 79, 382, 798, 758], [209, 772, 617, 756, 512], [427, 339, 855, 818, 122]]


def out(base: Base) -> Path:
    return Path(base["run"]["dir"])


RAMP = {"global_batch_size": 16, "ramp": {"start": 4, "steps": 11}}
KINDS: dict[str, Base] = {
    "unmasked": {"data": {"document_mask": False}},
    "mixture": {"data": {"phase_steps": [7]}},
    "synthetic": {"data": {"synthetic": True}, "model": {"vocab_size": 300}},
    "ramp": {"batch": RAMP},
    "ramped mixture": {"data": {"phase_steps": [7]}, "batch": RAMP | {"ramp": {"start": 4, "tokens": 4000}}},
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def prepare(base: Base, root: Path, kind: str) -> None:
    """Set the tables of the recipe that make its rows of that kind."""
    if kind in ("mixture", "ramped mixture", "synthetic"):
        base["data"] = {"seq_len": 32}
    for section, values in KINDS[kind].items():
        base[section] |= values
    large, small = ({"store": str(root / name)} for name in ("train", "validation"))
    if "mixture" in kind:
        base["data"]["mixture"] = {"large": large | {"weight": 3, "phase_weights": [1]}, "small": small}


@each_kind
def test_a_stop_and_a_kill_change_nothing(recipe_base, fake_engine, little_data, tmp_path, kind: str) -> None:
    prepare(recipe_base, little_data, kind)
    assert start(recipe_base) == 0
    whole, rows = losses(recipe_base), fake_engine.opened[0].rows
    recipe_base["run"]["dir"] = str(tmp_path / "stopped")
    assert start(recipe_base, stop_after_step=9) == 75
    assert start(recipe_base, "data.prefetch=0") == 0
    assert losses(recipe_base) == whole
    assert fake_engine.opened[1].rows + fake_engine.opened[2].rows == rows
    assert len(set(rows[:32])) > 8, "rows differ from one another"


def assert_boundaries(batch: StepBatch) -> None:
    """Compare with what the numbers of documents show, by the definition."""
    for cu_seqlens, rows in zip(batch.cu_seqlens.tolist(), batch.doc_ids.tolist(), strict=True):
        flat = [(i, number) for i, row in enumerate(rows) for number in row]
        starts = [t for t, one in enumerate(flat) if not t or one != flat[t - 1]]
        assert cu_seqlens == starts + [len(flat)] * (len(cu_seqlens) - len(starts))
        assert cu_seqlens[-1] == len(flat)


@given(st.lists(st.lists(st.integers(-1, 3), min_size=5, max_size=5), min_size=1, max_size=4))
def test_a_row_that_returns_to_a_document_is_found(rows: list[list[int]]) -> None:
    returning = [
        i for i, row in enumerate(rows) if any(row[t] in row[: t - 1] and row[t] != row[t - 1] for t in range(1, 5))
    ]
    if returning:
        with pytest.raises(ValueError, match=f"^{returning[0]}$"):
            find_document_starts(np.array(rows))
    else:
        starts = find_document_starts(np.array(rows))
        assert starts.tolist() == [[t == 0 or row[t] != row[t - 1] for t in range(5)] for row in rows]


@each_kind
def test_rows_are_those_of_the_library_whatever_the_ranks(recipe_base, little_data, kind: str) -> None:
    """Two ranks read by micro-steps the halves of each step that one rank reads, and the position is the same."""
    prepare(recipe_base, little_data, kind)
    recipe_base["batch"]["micro_batch_size"] = 2
    recipe = load(base=recipe_base).recipe
    data = open_data(recipe)

    def batches(rank: int, size: int) -> StreamBatches:
        return StreamBatches(recipe, data, Topology(rank=rank, world_size=size, dp_rank=rank, dp_size=size))

    one, two = batches(0, 1), [batches(rank, 2) for rank in range(2)]
    shapes: dict[int, set[tuple[int, ...]]] = {}
    for step in range(20):
        whole, halves = whole_batch(one.next_batch()), [whole_batch(rank.next_batch()) for rank in two]
        for name in ("input_ids", "labels", "position_ids", "doc_ids"):
            length = getattr(whole, name).shape[-1]
            parts = np.concatenate([getattr(half, name) for half in halves], axis=1)
            assert np.array_equal(getattr(whole, name).reshape(-1, length), parts.reshape(-1, length))
        assert_boundaries(whole)
        shapes.setdefault(whole.input_ids.shape[2], set()).add(whole.cu_seqlens.shape)
        assert {half.valid_tokens for half in halves} == {whole.valid_tokens}
        assert whole.valid_tokens == int((whole.labels != -100).sum()) > 0
        assert two[0].state == two[1].state == one.state
        assert one.state.step == step + 1
        assert whole.input_ids.shape[1] * whole.input_ids.shape[2] == 2 * 32, "as many positions in each micro-batch"
    if "ramp" not in kind:
        assert all(len(found) == 1 for found in shapes.values()), "the length must not depend on the batch"
    for opened in (one, *two):
        opened.close()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("unmasked", "synthetic")])
def test_inspect_names_the_rows_of_every_step_also_after_a_way_back(
    recipe_base, fake_engine, little_data, kind: str
) -> None:
    prepare(recipe_base, little_data, kind)
    fake_engine.poison = lambda call, batch: call in (8, 9, 10)
    assert start(recipe_base, "fault_tolerance.max_skipped_steps=2") == 0
    (rewind,) = events(recipe_base, "rollback")
    assert (rewind["step"], rewind["from_step"]) == (6, 10)
    first, last = rewind["rows"]
    last_data = events(recipe_base, "data")[-1]
    assert (last_data["step"], last_data["row"], last_data["skipped"]) == (6, last, [[first, last]])
    trained = iter(fake_engine.opened[0].rows)
    stores = {name: TokenStore(little_data / name) for name in ("train", "validation")}
    recipe = load(base=recipe_base).recipe
    unskipped = open_stream(recipe, open_data(recipe), Topology(rank=0, world_size=1, dp_rank=0, dp_size=1), None)
    for call in range(1, 25):  # calls 1 to 10 were steps 1 to 10, the others 7 to 20
        if 6 < call <= 10:  # the events tell what these steps have read since
            state = unskipped.state_after(call - 1)
            for _ in unskipped.global_rows(state, unskipped.batch_size_at(call - 1)):
                next(trained)
            continue
        report = inspect_step(out(recipe_base), call if call <= 6 else call - 4)
        assert report.last_recorded >= report.step
        assert report.batch_rows == len(report.rows)
        for row in report.rows:
            ids: list[int] = []
            for piece in row.spans:
                store = stores["validation" if row.origin == "small" else "train"]
                begin, _ = store.document_span(piece.document)
                ids += store.tokens(begin + piece.begin, piece.end - piece.begin).tolist()
            assert len(ids) + row.padding == 32
            assert next(trained) == np.array(ids + [0] * row.padding, np.int32).tobytes()
    assert next(trained, None) is None


def test_inspect_finds_the_stores_of_a_mixture_that_have_moved(recipe_base, fake_engine, little_data, tmp_path) -> None:
    for name in ("train", "validation"):
        shutil.copytree(little_data / name, tmp_path / "here" / name)
    prepare(recipe_base, tmp_path / "here", "mixture")
    assert start(recipe_base, stop_after_step=3) == 75
    rows = inspect_step(out(recipe_base), 2).rows
    moved = (tmp_path / "here" / "validation").rename(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=r"here/validation/manifest\.json.* with --store \[NAME=\]FOLDER"):
        inspect_step(out(recipe_base), 2)
    assert inspect_step(out(recipe_base), 2, stores={"small": moved}).rows == rows
    with pytest.raises(DataError, match=r"step 2 of .* belongs to another sequence of rows \(small\.store"):
        inspect_step(out(recipe_base), 2, stores={"small": tmp_path / "here" / "train"})


@pytest.mark.parametrize("kind", ["mixture", "ramped mixture"])
def test_a_mixture_is_lt_datas_with_phases_counted_in_steps(recipe_base, little_data, kind: str) -> None:
    prepare(recipe_base, little_data, kind)
    recipe = load(base=recipe_base).recipe
    size, ramp = recipe.batch.global_batch_size, recipe.batch.batch_ramp(32)
    first = 7 * size if ramp is None else ramp.rows_before(7)
    readers = {}
    for name, half in (("large", "train"), ("small", "validation")):
        store = TokenStore(little_data / half)
        readers[name] = RowReader(store, open_pack(store, seq_len=32))
    phases = [Phase(weights={"large": 3, "small": 1}), Phase(weights={"large": 1, "small": 1}, from_row=first)]
    wanted = Stream(Mixture(readers, phases), global_batch_size=size, ramp=ramp, seed=0)
    found = open_stream(recipe, open_data(recipe), Topology(rank=0, world_size=1, dp_rank=0, dp_size=1), None)
    for _ in range(12):
        a, b = wanted.next(), found.next()
        assert np.array_equal(a.row_ids, b.row_ids)
        assert a.state == b.state


def test_changed_weights_are_refused_where_they_were_read_and_free_ahead(recipe_base, fake_engine, little_data) -> None:
    prepare(recipe_base, little_data, "mixture")
    assert start(recipe_base, stop_after_step=5) == 75
    with pytest.raises(RecipeError, match=r"another sequence of rows \(weights@0"):
        start(recipe_base, "data.mixture.small.weight=2")
    assert start(recipe_base, "data.mixture.large.phase_weights=2", stop_after_step=9) == 75
    with pytest.raises(RecipeError, match="weights@56"):
        start(recipe_base, "data.mixture.large.phase_weights=5")
    recipe_base["data"]["mixture"]["more"] = {"store": str(little_data / "train")}
    with pytest.raises(RecipeError, match="another sequence of rows"):
        start(recipe_base, "data.mixture.large.phase_weights=2")


def test_random_rows_are_a_function_of_seed_and_row() -> None:
    numbers = np.array([0, 7, 2**61])
    made = SyntheticRows(vocab_size=1000, seq_len=5, seed=3)
    together = made.read_token_rows(numbers).to_int32()
    assert together.input_ids.tolist() == IDS, "a change of these is a change of every run on random rows"
    assert np.array_equal(together.labels[:, :-1], together.input_ids[:, 1:])
    assert made.count_labels(numbers) == int((together.labels != -100).sum()) == 15
    alone = SyntheticRows(vocab_size=1000, seq_len=5, seed=3).read_token_rows(numbers[1:2]).to_int32()
    assert alone.labels.tolist() == together.labels[1:2].tolist()
    large = SyntheticRows(vocab_size=2**17, seq_len=999, seed=2**63 - 1).read_token_rows(numbers).to_int32()
    assert 2**16 < large.input_ids.max() < 2**17
    assert len({tuple(row) for row in large.input_ids.tolist()}) == 3


def test_random_rows_are_in_no_store_and_may_be_validated_on_text(recipe_base, fake_engine, little_data) -> None:
    prepare(recipe_base, little_data, "synthetic")
    recipe_base["data"]["validation"] = str(little_data / "validation")
    assert start(recipe_base) == 0
    assert [r["step"] for r in read_jsonl(out(recipe_base) / "metrics.jsonl") if "val_loss" in r] == [20]
    with pytest.raises(RunDirError, match="or synthetic ones, which have no token store"):
        inspect_step(out(recipe_base), 2)
    with pytest.raises(RecipeError, match="seed: 0 before, 1 now"):
        start(recipe_base, "run.seed=1")
    recipe_base["model"]["vocab_size"] = 299
    with pytest.raises(ValueError, match=r"model\.vocab_size = 299.*300 ids"):
        start(recipe_base)
