"""What a run can read, over two ranks and one, in float64: the same losses, and a stop of two goes on as one."""

import json
from pathlib import Path
from typing import Any

import pytest

from lt_data import Document, Tokenizer, TokenStore, pack, prepare
from lt_test_helpers.runs import run
from lt_trainer.config.recipe import load
from lt_trainer.run_directory.jsonl import read_jsonl

STEPS = 8
SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
SHAPE |= {"num_hidden_layers": 2, "max_position_embeddings": 32}


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stores `a` and `b`, packed in rows of 32."""
    root = tmp_path_factory.mktemp("stores")
    words = ["rank", "row", "step", "batch", "bucket", "mixture", "weight", "phase"]
    texts = {
        name: [" ".join(words[(i * 3 + j * j + k) % 8] for j in range(3 + 7 * i % 60)) for i in range(25)]
        for k, name in enumerate("ab")
    }
    tokenizer = Tokenizer.train((text for half in texts.values() for text in half), vocab_size=280)
    for name, half in texts.items():
        documents = (Document(text=text, source=str(i)) for i, text in enumerate(half))
        prepare(documents, tokenizer=tokenizer, out=root / name)
        pack(TokenStore(root / name), seq_len=32)
    experts = {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 280}
    (root / "config.json").write_text(json.dumps(experts | SHAPE))
    return root


def kinds(root: Path) -> dict[str, dict[str, Any]]:
    store = {"store": str(root / "a")}
    other = {"store": str(root / "b")}
    return {
        "ramped mixture": {
            "data": {
                "mixture": {"a": {**store, "weight": 3, "phase_weights": [1]}, "b": other},
                "phase_steps": [4],
                "validation_sets": {"one": store, "two": other},
            },
            "batch": {"ramp": {"start": 4, "steps": 5}},
        },
        "experts": {
            "data": store,
            "model": {"config": str(root / "config.json")},
            "moe": {"aux_loss": 0.5, "sequence_aux_loss": 0.5, "router_z_loss": 0.1},
        },
        "synthetic": {"data": {"synthetic": True, "validation": ""}, "model": {"vocab_size": 280}},
    }


def train(base: dict[str, Any], stop_at_step: int) -> int:
    """One rank of a run, in that rank."""
    return run(load(base=base), stop_after_step=stop_at_step)


def numbers(out: Path, field: str = "loss") -> list[tuple[Any, ...]]:
    found = [r for r in read_jsonl(out / "metrics.jsonl") if field in r]
    return [(r["step"], r.get("val_set"), r[field], r.get("valid_tokens", r.get("val_tokens"))) for r in found]


@pytest.mark.parametrize(
    ("kind", "cp"), [("ramped mixture", 1), ("experts", 1), ("synthetic", 1), ("ramped mixture", 2)]
)
def test_two_ranks_train_as_one_and_go_on_as_one(ranks, stores: Path, tmp_path: Path, kind: str, cp: int) -> None:
    """Also where both read the same rows, each for its positions, and where experts are balanced over a micro-step."""
    shape = {"hidden_size": 32, "intermediate_size": 48, "n_heads": 4, "n_kv_heads": 2, "n_layers": 2}
    base: dict[str, Any] = {
        "model": shape,
        "data": {"seq_len": 32},
        "batch": {"global_batch_size": 8, "micro_batch_size": 2},
        "schedule": {"max_steps": STEPS, "warmup_steps": 1},
        "metrics": {"log_interval": 1},
        "engine": {"gpu": {"device": "cpu", "dtype": "float64"}},
    }
    if kind == "experts":
        del base["model"]
    for section, values in kinds(stores)[kind].items():
        base[section] = {**base.get(section, {}), **values}

    def of(name: str, dp: int = 1, cp: int = 1) -> dict[str, Any]:
        base["batch"]["micro_batch_size"] = 4 // dp  # a micro-step has 4 rows in every layout
        return {**base, "run": {"dir": str(tmp_path / name)}, "parallel": {"cp": cp}}

    assert ranks.run(train, of("one"), 0, ranks=1) == [0]
    assert ranks.run(train, of("two", 2 // cp, cp), 5, ranks=2) == [75, 75]
    assert ranks.run(train, of("two"), 0, ranks=1) == [0]
    for field in ("loss", "grad_norm"):
        one, two = numbers(tmp_path / "one", field), numbers(tmp_path / "two", field)
        assert [step for step, *_ in one] == list(range(1, STEPS + 1))
        for a, b in zip(one, two, strict=True):
            assert b == (*a[:2], pytest.approx(a[2], rel=1e-11), a[3])
    found, again = numbers(tmp_path / "one", "val_loss"), numbers(tmp_path / "two", "val_loss")
    assert [record[:2] for record in found] == ([(STEPS, "one"), (STEPS, "two")] if kind == "ramped mixture" else [])
    for a, b in zip(found, again, strict=True):
        assert b == (*a[:2], pytest.approx(a[2], rel=1e-10), a[3])
