"""A run goes on with the generations of its stores that it has read, until its recipe names others."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from lt_data import TokenStore, append, pack
from lt_test_helpers.runs import check, run
from lt_trainer.config.recipe import load
from lt_trainer.errors import RecipeError
from lt_trainer.observability.inspection import inspect_step
from lt_trainer.run_directory.jsonl import read_jsonl

OLD, NEW = "manifest-00000.json", "manifest-00001.json"


def start(base, *overrides: str, **options) -> int:
    return run(load(base=base, overrides=["run.engine=fake", *overrides]), environ={}, **options)


def metrics(base) -> list[tuple]:
    records = read_jsonl(Path(base["run"]["dir"]) / "metrics.jsonl")
    return [(r["step"], r.get("val_set"), r.get("loss"), r.get("val_loss"), r.get("val_tokens")) for r in records]


def log(base) -> str:
    return (Path(base["run"]["dir"]) / "logs/rank00000.log").read_text(encoding="utf-8")


@pytest.fixture
def grow(tmp_path: Path) -> Callable[..., None]:
    """Append documents to a store, as a generation with or without a pack."""

    def append_to(store: Path, *, packed: bool = True) -> None:
        text = tmp_path / f"more-{len(list(tmp_path.iterdir()))}.txt"
        text.write_text("alpha beta " * 90, encoding="utf-8")
        append(store, [text])
        if packed:
            pack(TokenStore(store), seq_len=32)

    return append_to


@pytest.fixture
def stores(recipe_base, fake_engine, little_data, tmp_path: Path) -> SimpleNamespace:
    """Copies of the stores of the recipe, of which a run reads the first half of its steps."""
    copies = {name: shutil.copytree(little_data / name, tmp_path / name) for name in ("train", "validation")}
    recipe_base["data"] |= {"store": str(copies["train"]), "validation": str(copies["validation"])}
    recipe_base["metrics"] = {**recipe_base.get("metrics", {}), "validation_interval": 5}
    return SimpleNamespace(**copies)


def test_a_run_goes_on_with_the_generation_that_it_has_read(recipe_base, stores, grow, tmp_path: Path) -> None:
    whole = recipe_base | {"run": recipe_base["run"] | {"dir": str(tmp_path / "whole")}}
    assert start(whole) == 0
    start(recipe_base, stop_after_step=6)
    grow(stores.train, packed=False)  # the newest generation is not even packed
    grow(stores.validation)
    check(load(base=recipe_base, overrides=["run.engine=fake"]), environ={})
    assert start(recipe_base) == 0
    assert metrics(recipe_base) == metrics(whole)
    for name, store in (("data.store", stores.train), ("data.validation", stores.validation)):
        assert log(recipe_base).count(f"{name}: reads {store / OLD}") == 1
    found = inspect_step(Path(recipe_base["run"]["dir"]), 12)
    assert found.rows == inspect_step(tmp_path / "whole", 12).rows
    assert found.stores["data.store"] == str(stores.train / OLD)
    pack(TokenStore(stores.train), seq_len=32)
    new = recipe_base | {"run": recipe_base["run"] | {"dir": str(tmp_path / "new")}}
    assert start(new, stop_after_step=6) == 75
    read = inspect_step(tmp_path / "new", 6).stores["data.store"]
    assert read == str(stores.train), "a new run reads the newest"


@pytest.mark.parametrize("mixture", [False, True])
def test_a_new_generation_is_taken_when_the_recipe_names_it(recipe_base, stores, grow, mixture: bool) -> None:
    data = recipe_base["data"]
    if mixture:
        del data["store"]
        data["mixture"] = {"a": {"store": str(stores.train), "weight": 0.5}}
        data["mixture"]["b"] = {"store": str(stores.validation), "weight": 0.5}
    start(recipe_base, stop_after_step=6)
    grow(stores.train)
    (data["mixture"]["a"] if mixture else data)["store"] = str(stores.train / NEW)
    start(recipe_base, stop_after_step=9)
    field = "data.mixture.a.store" if mixture else "data.store"
    assert f"{field}: from step 7 on {stores.train / NEW}, before {stores.train / OLD}" in log(recipe_base)
    run_folder = Path(recipe_base["run"]["dir"])
    assert inspect_step(run_folder, 6).stores[field] == str(stores.train / OLD)
    assert inspect_step(run_folder, 7).stores[field] == str(stores.train / NEW)
    # from now on it is the one that the run has read
    grow(stores.train)
    (data["mixture"]["a"] if mixture else data)["store"] = str(stores.train)
    assert start(recipe_base) == 0
    assert inspect_step(run_folder, 12).stores[field] == str(stores.train / NEW)


def test_only_the_generation_may_change(recipe_base, stores, grow) -> None:
    start(recipe_base, stop_after_step=6)
    grow(stores.train)
    for other in ({"store": str(stores.train / NEW), "document_mask": False}, {"store": str(stores.validation)}):
        with pytest.raises(RecipeError, match="another sequence"):
            start(recipe_base | {"data": recipe_base["data"] | other})
