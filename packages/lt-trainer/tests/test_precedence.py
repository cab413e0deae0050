"""Which of two sources of a recipe's value wins: each pair, and all at once."""

from itertools import combinations
from pathlib import Path

import pytest

from lt_trainer.config.recipe import ResolvedRecipe, load

SOURCES = ("set", "hyperparameter", "toml", "preset", "default")
"""The first wins."""
WIDTHS = {"set": 96, "hyperparameter": 240, "toml": 288, "preset": 192, "default": 768}
ORIGINS = {
    "set": "--set",
    "hyperparameter": "hyperparameter HIDDEN_SIZE",
    "toml": "run.toml:5",
    "preset": "preset tiny-2m",
    "default": "default",
}


def resolve(folder: Path, given: tuple[str, ...]) -> ResolvedRecipe:
    """Resolve a recipe whose model.hidden_size these sources give."""
    lines = ["[data]", 'store = "store"', "seq_len = 64", "[model]"]
    lines += [f"hidden_size = {WIDTHS['toml']}"] if "toml" in given else []
    lines += ['preset = "tiny-2m"'] if "preset" in given else []
    (folder / "run.toml").write_text("\n".join(lines), encoding="utf-8")
    return load(
        folder / "run.toml",
        hyperparameters={"HIDDEN_SIZE": str(WIDTHS["hyperparameter"])} if "hyperparameter" in given else {},
        overrides=[f"model.hidden_size={WIDTHS['set']}"] if "set" in given else [],
    )


@pytest.mark.parametrize("given", [*combinations(SOURCES, 2), SOURCES], ids=" over ".join)
def test_the_first_source_wins_and_is_named(tmp_path: Path, given: tuple[str, ...]) -> None:
    resolved = resolve(tmp_path, given)
    assert resolved.recipe.model.hidden_size == WIDTHS[given[0]]
    assert resolved.origins["model.hidden_size"].endswith(ORIGINS[given[0]])


def test_the_last_of_two_sets_wins(tmp_path: Path) -> None:
    resolved = load(base={"data": {"store": "s"}}, overrides=["optimizer.lr=0.1", "optimizer.lr=0.2"])
    assert resolved.recipe.optimizer.lr == 0.2
