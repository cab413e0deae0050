"""`[evaluation]` in a run with the fake engine: when it is done, what it writes, that training does not notice."""

import re
from pathlib import Path
from typing import Any

import pytest

from lt_test_helpers.harness_tasks import write_task
from lt_test_helpers.runs import run
from lt_trainer.config.recipe import load, to_toml
from lt_trainer.errors import RecipeError
from lt_trainer.observability.sinks import scalars
from lt_trainer.run_directory.jsonl import read_jsonl
from lt_trainer.training.benchmark import resolve_bench_recipe


@pytest.fixture
def tasks(tmp_path: Path, recipe_base: dict[str, Any]) -> Path:
    """A folder with a multiple-choice task and a cloze, which the recipe evaluates every eight steps."""
    folder = tmp_path / "tasks"
    words = ["alpha", "beta", "gamma", "delta"]
    choices = [{"context": f"{i} and", "choices": [f" {w}" for w in words], "label": i % 4} for i in range(9)]
    write_task(folder, "choice", choices)
    write_task(folder, "cloze", [{"context": f"{i} and", "target": f" {words[i % 4]}"} for i in range(7)])
    recipe_base["evaluation"] = {"tasks": ["choice", "cloze"], "include_path": str(folder), "interval": 8}
    return folder


def start(base: dict[str, Any], *overrides: str, **options: Any) -> int:
    return run(load(base=base, overrides=["run.engine=fake", *overrides]), environ={}, **options)


def records(base: dict[str, Any], key: str) -> list[dict[str, Any]]:
    return [r for r in read_jsonl(Path(base["run"]["dir"]) / "metrics.jsonl") if key in r]


def test_tasks_and_sets_are_evaluated_every_n_steps_and_training_is_the_same(
    recipe_base, fake_engine, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of a set add up to the whole, which has the validation's tokens. A line of the log for each batch."""
    monkeypatch.setattr("lt_trainer.observability.run_logger.SECONDS_BETWEEN_LINES", 0.0)
    assert start(recipe_base, "evaluation.stores=true", "metrics.validation_tokens=-1") == 0
    folder = Path(recipe_base["run"]["dir"])
    found = records(recipe_base, "eval_task")
    names = (("choice", 9), ("cloze", 7), ("validation", 5))
    assert [(r["step"], r["eval_task"], r["eval_items"]) for r in found] == [
        (s, *n) for s in (8, 16, 20) for n in names
    ]
    items = read_jsonl(folder / "evaluation" / "step-00000008" / "choice.jsonl")
    assert sum(item["acc"] for item in items) / 9 == found[0]["eval_acc"] == scalars(found[0])["evaluation/choice/acc"]
    assert len({r["eval_perplexity"] for r in found if "eval_perplexity" in r}) == 6, "the weights of the step"
    whole, *groups = read_jsonl(folder / "evaluation" / "step-00000016" / "validation.jsonl")
    assert (whole["loss"], whole["bits_per_byte"]) == (found[5]["eval_loss"], found[5]["eval_bits_per_byte"])
    assert whole["tokens"] == records(recipe_base, "val_loss")[0]["val_tokens"]
    for kind in ("source", "length"):
        parts = [group for group in groups if group["group"] == kind]
        assert sum(group["tokens"] for group in parts) == whole["tokens"]
        assert sum(group["loss_sum"] for group in parts) == pytest.approx(whole["loss_sum"], rel=1e-12)
    log = (folder / "logs" / "rank00000.log").read_text()
    progress = re.findall(r"# .*evaluation of (\w+): (\d+) of (\d+) batches, .* s left", log)
    assert {name for name, done, total in progress if int(done) < int(total)} == {"tasks", "validation"}
    with_evaluation = [(r["step"], r["loss"], r["grad_norm"]) for r in records(recipe_base, "loss")]
    recipe_base["run"]["dir"] = str(tmp_path / "without")
    del recipe_base["evaluation"]
    assert start(recipe_base) == 0
    assert [(r["step"], r["loss"], r["grad_norm"]) for r in records(recipe_base, "loss")] == with_evaluation
    assert not (tmp_path / "without" / "evaluation").exists()


def test_a_resumed_run_has_the_results_of_the_uninterrupted_one(
    recipe_base, fake_engine, tasks: Path, tmp_path: Path
) -> None:
    assert start(recipe_base) == 0
    whole = [{**r, "elapsed_s": 0} for r in records(recipe_base, "eval_task") if r["step"] != 16]
    recipe_base["run"]["dir"] = str(tmp_path / "stopped")
    assert start(recipe_base, stop_after_step=16) == 75  # a stop is quick: the step's evaluation is left out
    assert [r["step"] for r in records(recipe_base, "eval_task")] == [8, 8]
    assert start(recipe_base) == 0
    assert [{**r, "elapsed_s": 0} for r in records(recipe_base, "eval_task")] == whole


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["evaluation.tasks=[choise]"], r"evaluation.tasks = .*'choise' is not a registered task.* lm-eval ls tasks"),
        (["evaluation.stores=true", "data.validation="], r"evaluation\.stores = true.*there is no validation data"),
        (["evaluation.stores=true", "evaluation.tasks=[validation]"], "a task and a validation set have the same name"),
        (["data.synthetic=true", "data.store=", "data.validation=", "model.vocab_size=9"], "there is no tokenizer"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_anything_is_written(
    recipe_base, fake_engine, tasks: Path, overrides: list[str], problem: str
) -> None:
    with pytest.raises(RecipeError, match=problem):
        start(recipe_base, *overrides)
    assert not Path(recipe_base["run"]["dir"]).exists()
    assert not fake_engine.opened


def test_a_benchmark_of_the_recipe_leaves_the_tasks_out(recipe_base, tasks: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(to_toml(load(base=recipe_base).recipe))
    resolved = resolve_bench_recipe(str(tmp_path / "run.toml"), "", overrides=[], hyperparameters=None)
    assert resolved.recipe.evaluation.tasks == ()
