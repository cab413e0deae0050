"""A loader of the user's own over two ranks: labels counted over both, states kept of both, errors raised on both."""

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from lt_ckpt import find_latest_valid
from lt_test_helpers.runs import run
from lt_trainer.config.recipe import load
from lt_trainer.errors import LoaderError
from lt_trainer.run_directory.jsonl import read_jsonl

VOCAB, SEQ_LEN = 64, 24


class Loader:
    """Row n of one sequence goes to dp_rank n % dp_size; rows differ widely in their labels."""

    def __init__(self, *, dp_rank: int, dp_size: int, **facts: Any) -> None:
        self.at, self.by = dp_rank, dp_size
        self.bad = int(os.environ.get("BAD_ROW", "-1"))

    def __iter__(self) -> Any:
        while True:
            rng = np.random.default_rng(self.at)
            labels = rng.integers(0, VOCAB, SEQ_LEN)
            labels[rng.random(SEQ_LEN) < (self.at % 2) * 0.9] = -100  # rows of rank 1 have a tenth of the labels
            if 8 <= self.at < 12:  # step 3
                labels[:] = -100
            ids = rng.integers(0, VOCAB, SEQ_LEN)
            if self.at == self.bad:
                ids[3] = VOCAB
            self.at += self.by
            yield {"input_ids": ids, "labels": labels}

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def base_of(out: str, cp: int = 1) -> dict[str, Any]:
    return {
        "run": {"dir": out},
        "model": {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 48,
            "n_heads": 4,
            "n_kv_heads": 2,
            "n_layers": 2,
        },
        "data": {"loader": "rows_of_two_ranks:Loader", "seq_len": SEQ_LEN},
        "batch": {"global_batch_size": 8, "micro_batch_size": 2, "ramp": {"start": 4, "steps": 3}},
        "schedule": {"max_steps": 8, "warmup_steps": 1},
        "checkpoint": {"interval": 4},
        "metrics": {"log_interval": 1},
        "engine": {"gpu": {"device": "cpu", "dtype": "float64"}},
        "parallel": {"cp": cp},
    }


def train(out: str, stop_at_step: int, cp: int = 1) -> int:
    """One rank of a run, in that rank."""
    module = ModuleType("rows_of_two_ranks")
    module.Loader = Loader  # pyright: ignore[reportAttributeAccessIssue]
    sys.modules["rows_of_two_ranks"] = module
    return run(load(base=base_of(out, cp)), stop_after_step=stop_at_step)


def records(out: Path) -> dict[int, tuple[float, int]]:
    return {r["step"]: (r["loss"], r["valid_tokens"]) for r in read_jsonl(out / "metrics.jsonl") if "loss" in r}


@pytest.mark.parametrize("cp", [1, 2])
def test_two_ranks_train_as_one_and_go_on_with_both_states(ranks, tmp_path: Path, cp: int) -> None:
    """A step of two ranks has the rows of a step of one, in another order: the same sums.

    With two context-parallel ranks each, whose loaders read the same rows: labels and states are counted once. Step 3
    has no labels: on all of them it changes nothing.
    """
    assert ranks.run(train, str(tmp_path / "one"), 0, ranks=1) == [0]
    assert ranks.run(train, str(tmp_path / "two"), 5, cp, ranks=2 * cp) == [75] * 2 * cp
    found, _ = find_latest_valid(tmp_path / "two" / "checkpoints")
    assert found is not None
    rows = 4 + 4 + 4 + 8 + 8
    assert found.manifest.data["row"] == rows
    assert found.manifest.data["loader"] == {"0": {"at": rows}, "1": {"at": rows + 1}}
    assert ranks.run(train, str(tmp_path / "two"), 0, cp, ranks=2 * cp) == [0] * 2 * cp
    one, two = records(tmp_path / "one"), records(tmp_path / "two")
    assert sorted(one) == sorted(two) == list(range(1, 9))
    assert one.pop(3) == two[3] == (None, 0)
    for step, (loss, valid) in one.items():
        assert two[step][1] == valid
        assert two[step][0] == pytest.approx(loss, rel=1e-12)


def test_a_bad_row_of_one_rank_ends_both_with_its_reason(ranks, tmp_path: Path) -> None:
    """Row 13 is the seventh of rank 1, which finds it; rank 0 says what it has heard."""
    with pytest.raises(LoaderError, match=r"row 6, position 3: input_ids = 64 is not in 0\.\.63") as caught:
        ranks.run(train, str(tmp_path / "bad"), 0, ranks=2, env={"BAD_ROW": "13"})
    assert caught.value.exit_code == 64
    logs = [(tmp_path / "bad" / "logs" / f"rank{rank:05}.log").read_text() for rank in range(2)]
    assert all("LoaderError" in log and "row 6, position 3" in log for log in logs)
    assert max(records(tmp_path / "bad")) == 3
