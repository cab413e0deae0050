"""Custom loader: its arguments, its rows, resume, and every rejection."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lt_ckpt import find_latest_valid
from lt_test_helpers.runs import run
from lt_trainer.config.recipe import load
from lt_trainer.control import Control
from lt_trainer.data.custom_loader import LoaderBatches
from lt_trainer.engine import Topology
from lt_trainer.errors import LoaderError, RecipeError
from lt_trainer.run_directory.jsonl import read_jsonl

VOCAB, SEQ_LEN = 50, 8
Base = dict[str, dict[str, Any]]


def row(number: int) -> dict[str, np.ndarray]:
    """Row `number` of one sequence: ids that tell rows apart, labels but for the last place."""
    ids = (np.arange(SEQ_LEN) * 7 + number * 13) % VOCAB
    return {"input_ids": ids, "labels": np.append(ids[1:], -100)}


class Stateful:
    """Rows dp_rank, dp_rank + dp_size, ... of the sequence; knows where it stands."""

    def __init__(self, *, dp_rank: int, dp_size: int, **facts: Any) -> None:
        self.facts = facts
        self.at, self.by, self.drawn = dp_rank, dp_size, 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            item, self.at = row(self.at), self.at + self.by
            self.drawn += 1
            yield item

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


@pytest.fixture
def base(recipe_base: Base) -> Base:
    recipe_base["model"]["vocab_size"] = VOCAB
    recipe_base["data"] = {"loader": "their_rows:make", "seq_len": SEQ_LEN}
    return recipe_base


@pytest.fixture
def give(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[Any]]:
    """Sets what `their_rows:make` is; returns the list of what it has made."""
    made: list[Any] = []

    def set_factory(factory: Any) -> list[Any]:
        def make(**facts: Any) -> Any:
            made.append(factory(**facts))
            return made[-1]

        monkeypatch.setitem(sys.modules, "their_rows", SimpleNamespace(make=make))
        return made

    return set_factory


def start(base: Base, *overrides: str, **options: Any) -> int:
    return run(load(base=base, overrides=["run.engine=fake", *overrides]), environ={}, **options)


def losses(base: Base) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in read_jsonl(Path(base["run"]["dir"]) / "metrics.jsonl") if "loss" in r}


def trained(engine: Any) -> list[list[int]]:
    return [np.frombuffer(one, np.int32).tolist() for one in engine.rows]


def ids(*numbers: int) -> list[list[int]]:
    return [row(number)["input_ids"].tolist() for number in numbers]


def batches(base: Base, *, rank: int = 0, size: int = 1, saved: Any = None) -> LoaderBatches:
    topology = Topology(rank=rank, world_size=size, dp_rank=rank, dp_size=size)
    return LoaderBatches(load(base=base).recipe, topology, Control(), saved)


def test_it_is_told_who_asks_and_a_stop_goes_on_exactly_with_a_state(base, fake_engine, give, tmp_path) -> None:
    made = give(Stateful)
    assert start(base) == 0
    assert trained(fake_engine.opened[0]) == ids(*range(160))
    facts = made[0].facts
    assert (facts["rank"], facts["world"], facts["seed"]) == (0, 1, 0)
    assert facts["recipe"]["data"]["seq_len"] == SEQ_LEN
    assert facts["recipe"]["batch"]["global_batch_size"] == 8
    assert made[0].drawn == 160
    whole = losses(base)
    base["run"]["dir"] = str(tmp_path / "stopped")
    assert start(base, stop_after_step=9) == 75
    found, _ = find_latest_valid(tmp_path / "stopped" / "checkpoints")
    assert found is not None
    assert found.manifest.data["loader"] == {"0": {"at": 72}}
    assert start(base) == 0
    assert losses(base) == whole
    assert made[2].drawn == 160 - 72, "nothing is read again"


def test_what_is_not_given_is_made(base, give) -> None:
    docs = [0, 0, 0, 1, 1, -1, -1, -1]
    give(lambda **facts: [row(0), {**row(1), "doc_ids": docs}, {**row(2), "doc_ids": docs, "position_ids": [3] * 8}])
    base["batch"] |= {"global_batch_size": 3, "micro_batch_size": 3}
    batch = batches(base).next_batch()
    assert batch.input_ids.dtype == batch.labels.dtype == batch.position_ids.dtype == batch.doc_ids.dtype == np.int32
    assert batch.input_ids.shape == (1, 3, SEQ_LEN)
    assert batch.doc_ids[0].tolist() == [[0] * 8, docs, docs]
    assert batch.position_ids[0].tolist() == [[*range(8)], [0, 1, 2, 0, 1, 0, 1, 2], [3] * 8]
    assert batch.valid_tokens == 3 * 7
    assert batch.cu_seqlens.tolist() == [[0, 8, 11, 13, 16, 19, 21, *[24] * 6]]  # room for four documents per row
    base["data"] |= {"document_mask": False}
    assert batches(base).next_batch().cu_seqlens.tolist() == [[0, 8, 16, 24]]


def test_without_a_state_it_is_refused_or_read_again(base, fake_engine, give, tmp_path) -> None:
    give(lambda **facts: map(row, range(1000)))
    save = "checkpoint.async_save=true"
    assert start(base, save) == 0
    whole = losses(base)
    base["run"]["dir"] = str(tmp_path / "stopped")
    assert start(base, save, stop_after_step=9) == 75
    with pytest.raises(LoaderError, match=r"no state_dict and load_state_dict.*data\.loader_resume to 'replay'"):
        start(base, save)
    assert start(base, save, "data.loader_resume=replay") == 0
    assert losses(base) == whole
    assert trained(fake_engine.opened[-1]) == ids(*range(72, 160))


def test_a_way_back_goes_on_behind_the_rows_and_is_remembered(base, fake_engine, give) -> None:
    give(Stateful)
    fake_engine.poison = lambda call, batch: call in (8, 9, 10)
    assert start(base, "fault_tolerance.max_skipped_steps=2", stop_after_step=15) == 75
    found, _ = find_latest_valid(Path(base["run"]["dir"]) / "checkpoints")
    assert (found.manifest.data["row"], found.manifest.data["skipped"]) == (15 * 8 + 32, [[48, 80]])
    fake_engine.poison = lambda call, batch: False
    assert start(base) == 0
    # steps 1 to 10, then 7 to 20 behind them: 24 steps in one sequence
    assert trained(fake_engine.opened[0]) + trained(fake_engine.opened[1]) == ids(*range(24 * 8))
    data = [e for e in read_jsonl(Path(base["run"]["dir"]) / "events.jsonl") if e["event"] == "data"]
    assert [(e["step"], e["row"]) for e in data] == [(0, 0), (6, 80), (15, 152)]
    assert data[0]["data"]["loader"] == "their_rows:make"


def test_an_iterable_that_ends_is_walked_again_and_an_iterator_is_not(base, fake_engine, give) -> None:
    give(lambda **facts: [row(n) for n in range(6)])
    assert start(base, "schedule.max_steps=3") == 0
    assert trained(fake_engine.opened[0]) == ids(*(n % 6 for n in range(24)))
    base["run"]["dir"] += "-2"
    give(lambda **facts: iter([row(n) for n in range(20)]))
    with pytest.raises(LoaderError, match=r'their_rows:make", after 20 rows of dp_rank 0: ended after 20 rows'):
        start(base)


def test_items_of_several_rows(base, fake_engine, give) -> None:
    def blocks(size: int) -> Callable[..., Any]:
        return lambda **facts: (
            {name: np.stack([row(at + i)[name] for i in range(size)]) for name in ("input_ids", "labels")}
            for at in range(0, 10**6, size)
        )

    give(blocks(4))
    assert start(base, stop_after_step=5) == 75
    assert start(base, "data.loader_resume=replay") == 0
    assert trained(fake_engine.opened[0]) + trained(fake_engine.opened[1]) == ids(*range(160))
    base["run"]["dir"] += "-2"
    give(blocks(3))
    with pytest.raises(LoaderError, match="an item of 3 rows crosses a step boundary, row 8 of"):
        start(base)


def changed(name: str, place: int, value: int) -> dict[str, np.ndarray]:
    made = row(3) | {"doc_ids": np.zeros(SEQ_LEN, np.int64), "position_ids": np.arange(SEQ_LEN)}
    made[name][place] = value
    return made


BAD = [
    (changed("input_ids", 2, VOCAB), f"row 3, position 2: input_ids = {VOCAB} is not in 0..{VOCAB - 1}"),
    (changed("labels", 1, -1), "row 3, position 1: labels = -1"),
    (changed("doc_ids", 1, -2), "row 3, position 1: doc_ids = -2"),
    (changed("doc_ids", 4, 1), "row 3: doc_ids return to an earlier document of the row"),
    (changed("position_ids", 4, SEQ_LEN), "row 3, position 4: position_ids = 8"),
    ({"input_ids": row(3)["input_ids"]}, "row 3: labels are missing"),
    ({name: array[:5] for name, array in row(3).items()}, "row 3: input_ids are int64 [5]; expected integers [8] or"),
    ({**row(3), "labels": row(3)["labels"] * 1.0}, "row 3: labels are float64 [8]; expected integers"),
    (7, "row 3: input_ids are missing"),
    ({**row(3), "attention_mask": np.ones(SEQ_LEN, np.int64)}, "row 3: unknown key attention_mask"),
]


@pytest.mark.parametrize(("item", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_bad_rows_are_named(base, fake_engine, give, item: Any, message: str) -> None:
    give(lambda **facts: [*map(row, range(3)), item])
    with pytest.raises(LoaderError) as caught:
        start(base)
    assert message in str(caught.value)
    assert caught.value.exit_code == 64


def test_labels_that_are_not_shifted_are_refused(base, fake_engine, give) -> None:
    """As transformers' collators make them; a row of one token has equal labels when they are shifted, too."""
    ids_of_row = row(1)["input_ids"]
    padded = {"input_ids": ids_of_row, "labels": np.append(ids_of_row[:5], [-100] * 3)}
    unlabeled = {"input_ids": ids_of_row, "labels": np.full(SEQ_LEN, -100)}
    give(lambda **facts: [unlabeled, padded])
    with pytest.raises(LoaderError, match=r"row 1: labels are equal to input_ids.*; shift them"):
        start(base)
    same = {"input_ids": np.full(SEQ_LEN, 4), "labels": np.append([4] * (SEQ_LEN - 1), -100)}
    give(lambda **facts: [same])
    assert start(base, "schedule.max_steps=2") == 0


def test_a_module_that_cannot_be_imported_is_an_error_of_the_recipe(base, fake_engine, tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "rows_of_nobody.py").write_text("1 // 0\n")
    (tmp_path / "rows_that_leave.py").write_text("raise SystemExit(0)\n")
    for loader, message in (
        ("rows_of_nobody:make", "ZeroDivisionError: integer division"),
        ("rows_that_leave:make", "SystemExit: 0"),
        ("1abc:x", "ValueError: invalid format"),
    ):
        base["data"]["loader"] = loader
        with pytest.raises(RecipeError, match=rf'data\.loader = "{loader}" .*cannot be imported: {message}'):
            start(base)


def of_state(state: Any) -> type[Stateful]:
    return type("Odd", (Stateful,), {"state_dict": lambda self: state})


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda **facts: (row(n) if n < 11 else {}["disk"] for n in range(12)), "after 11 rows of dp_rank 0: KeyError"),
        (lambda **facts: 1 // 0, "after 0 rows of dp_rank 0: ZeroDivisionError"),
        (of_state({"at": {1, 2}}), "not JSON serializable"),
        (of_state({1: "at"}), "dicts with string keys"),
    ],
)
def test_a_loader_that_fails_is_told_with_its_row(base, fake_engine, give, factory: Any, message: str) -> None:
    give(factory)
    with pytest.raises(LoaderError, match=message):
        start(base)


def test_a_run_goes_on_with_the_same_rows_only(base, fake_engine, give, little_data) -> None:
    give(Stateful)
    assert start(base, stop_after_step=5) == 75
    with pytest.raises(LoaderError, match=r"belongs to other rows: .*'seed': 0}, .*'seed': 1}"):
        start(base, "run.seed=1")
    saved = find_latest_valid(Path(base["run"]["dir"]) / "checkpoints")[0].manifest.data
    base["batch"]["micro_batch_size"] = 2
    with pytest.raises(LoaderError, match=r"states of 1 data-parallel ranks.* does not fit 2"):
        batches(base, rank=1, size=2, saved=saved)
    other = {**base, "data": {"synthetic": True, "seq_len": SEQ_LEN}}
    with pytest.raises(RecipeError, match=r"another sequence of rows \(synthetic: None before"):
        start(other)


def test_modules_of_the_current_folder_are_found_and_none_is_said_at_once(
    base, fake_engine, tmp_path, monkeypatch
) -> None:
    (tmp_path / "rows_of_this_folder.py").write_text(
        "def make(**facts):\n    return [{'input_ids': [1] * 8, 'labels': [2] * 8}]\n"
    )
    (tmp_path / "json.py").write_text("raise AssertionError('a file of the folder stands before a package')")
    for loader, message in (("not_there_at_all:make", "No module named"), ("json:no", "module 'json' has no")):
        base["data"]["loader"] = loader
        with pytest.raises(RecipeError, match=rf"cannot be imported: {message}.*; write it as module:function"):
            start(base)
    assert fake_engine.opened == []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.delitem(sys.modules, "json")
    base["data"]["loader"] = "rows_of_this_folder:make"
    assert start(base, "schedule.max_steps=2") == 0
    assert trained(fake_engine.opened[0]) == [[1] * 8] * 16
