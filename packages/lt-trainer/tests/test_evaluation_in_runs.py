"""`[evaluation]` in a run with the fake engine: when it is done, what it writes, that training does not notice."""

import re
from pathlib import Path
from typing import Any

import pytest

from lt_test_helpers.harness_tasks import write_task
from lt_test_helpers.runs import run
from lt_trainer.config.recipe import load
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


def test_tasks_are_evaluated_every_n_steps_and_training_is_the_same(
    recipe_base, fake_engine, tasks: Path, tmp_path: Path
) -> None:
    assert start(recipe_base) == 0
    found = records(recipe_base, "eval_task")
    assert [(r["step"], r["eval_task"]) for r in found] == [(s, t) for s in (8, 16, 20) for t in ("choice", "cloze")]
    first = found[0]
    assert first["eval_items"] == 9
    items = read_jsonl(Path(recipe_base["run"]["dir"]) / "evaluation" / "step-00000008" / "choice.jsonl")
    assert sum(item["acc"] for item in items) / 9 == first["eval_acc"]
    assert found[1]["eval_perplexity"] != found[3]["eval_perplexity"], "the weights of the step"
    with_evaluation = [(r["step"], r["loss"], r["grad_norm"]) for r in records(recipe_base, "loss")]
    recipe_base["run"]["dir"] = str(tmp_path / "without")
    del recipe_base["evaluation"]
    assert start(recipe_base) == 0
    assert [(r["step"], r["loss"], r["grad_norm"]) for r in records(recipe_base, "loss")] == with_evaluation
    assert not (tmp_path / "without" / "evaluation").exists()


def test_validation_sets_are_evaluated_by_source_and_length(recipe_base, fake_engine, tmp_path: Path) -> None:
    """The groups add up to the whole, which has the validation's tokens; training does not notice."""
    recipe_base["evaluation"] = {"stores": True, "interval": 8}
    assert start(recipe_base, "metrics.validation_tokens=-1") == 0
    folder = Path(recipe_base["run"]["dir"])
    found = records(recipe_base, "eval_loss")
    assert [(r["step"], r["eval_task"], r["eval_items"]) for r in found] == [(s, "validation", 5) for s in (8, 16, 20)]
    assert len({r["eval_loss"] for r in found}) == 3, "the weights of the step"
    groups = read_jsonl(folder / "evaluation" / "step-00000016" / "validation.jsonl")
    assert [group["group"] for group in groups].count("source") == 5
    assert (groups[0]["loss"], groups[0]["bits_per_byte"]) == (found[1]["eval_loss"], found[1]["eval_bits_per_byte"])
    assert groups[0]["tokens"] == records(recipe_base, "val_loss")[0]["val_tokens"]
    for kind in ("source", "length"):
        parts = [group for group in groups if group["group"] == kind]
        assert sum(group["tokens"] for group in parts) == groups[0]["tokens"]
        assert sum(group["loss_sum"] for group in parts) == pytest.approx(groups[0]["loss_sum"], rel=1e-12)
    assert scalars(found[0])["evaluation/validation/loss"] == found[0]["eval_loss"]
    losses = [(r["step"], r["loss"], r["grad_norm"]) for r in records(recipe_base, "loss")]
    recipe_base["run"]["dir"] = str(tmp_path / "without")
    del recipe_base["evaluation"]
    assert start(recipe_base) == 0
    assert [(r["step"], r["loss"], r["grad_norm"]) for r in records(recipe_base, "loss")] == losses


def test_the_progress_of_tasks_and_stores_is_in_the_log(
    recipe_base, fake_engine, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line for each batch but the last, where the time between two lines is none."""
    monkeypatch.setattr("lt_trainer.observability.run_logger.SECONDS_BETWEEN_LINES", 0.0)
    recipe_base["evaluation"] |= {"stores": True, "interval": 0}
    assert start(recipe_base, "schedule.max_steps=3") == 0
    log = (Path(recipe_base["run"]["dir"]) / "logs" / "rank00000.log").read_text()
    found = re.findall(r"# .*evaluation of (\w+): (\d+) of (\d+) batches, .* s left", log)
    assert {name for name, _, _ in found} == {"tasks", "validation"}
    assert all(int(done) < int(total) for _, done, total in found)


def test_stores_without_validation_and_names_of_both_kinds_are_refused(tmp_path: Path) -> None:
    data = {"store": "s", "seq_len": 32}
    with pytest.raises(RecipeError, match=r"evaluation\.stores = True.*there is no validation data"):
        load(base={"data": data, "evaluation": {"stores": True}})
    with pytest.raises(RecipeError, match="a task and a validation set are both called 'validation'"):
        load(base={"data": {**data, "validation": "v"}, "evaluation": {"stores": True, "tasks": ["validation"]}})
    with pytest.raises(RecipeError, match=r"evaluation\.limit = 3.*has no effect with tasks"):
        load(base={"data": {**data, "validation": "v"}, "evaluation": {"stores": True, "limit": 3}})


def test_a_resumed_run_has_the_results_of_the_uninterrupted_one(
    recipe_base, fake_engine, tasks: Path, tmp_path: Path
) -> None:
    assert start(recipe_base) == 0
    whole = [{**r, "elapsed_s": 0} for r in records(recipe_base, "eval_task")]
    recipe_base["run"]["dir"] = str(tmp_path / "stopped")
    assert start(recipe_base, stop_after_step=16) == 75  # a stop is quick: the step's evaluation is left out
    assert [r["step"] for r in records(recipe_base, "eval_task")] == [8, 8]
    assert start(recipe_base) == 0
    found = [{**r, "elapsed_s": 0} for r in records(recipe_base, "eval_task")]
    assert found == [r for r in whole if r["step"] != 16]


def test_sinks_have_a_tag_for_each_task_and_metric() -> None:
    record = {"step": 8, "eval_task": "choice", "eval_items": 9, "elapsed_s": 1.5, "eval_acc": 0.25}
    assert scalars(record) == {"evaluation/choice/items": 9.0, "evaluation/choice/acc": 0.25}


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        (
            "evaluation.tasks=[choise]",
            r"evaluation.tasks = .*task 'choise': lm-evaluation-harness has none of that name",
        ),
        ("evaluation.tasks=[]", "has no effect with tasks"),
        ("evaluation.tasks=[cloze, cloze]", "duplicate task"),
        ("evaluation.interval=-1", "must be at least 0"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_anything_is_written(
    recipe_base, fake_engine, tasks: Path, override: str, problem: str
) -> None:
    with pytest.raises(RecipeError, match=problem):
        start(recipe_base, override)
    assert not Path(recipe_base["run"]["dir"]).exists()
    assert not fake_engine.opened


def test_tasks_without_a_tokenizer_are_refused(recipe_base) -> None:
    with pytest.raises(RecipeError, match="without a token store there is no tokenizer"):
        load(
            base={
                "data": {"synthetic": True, "seq_len": 32},
                "model": {"vocab_size": 300},
                "evaluation": {"tasks": ["lt_copy"]},
            }
        )


def test_a_benchmark_of_the_recipe_leaves_the_tasks_out(recipe_base, tasks: Path, tmp_path: Path) -> None:
    from lt_trainer.config.recipe import to_toml

    (tmp_path / "run.toml").write_text(to_toml(load(base=recipe_base).recipe))
    resolved = resolve_bench_recipe(str(tmp_path / "run.toml"), "", overrides=[], hyperparameters=None)
    assert resolved.recipe.evaluation.tasks == ()
