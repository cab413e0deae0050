"""Files of the run in a release: recipe, environment, logs and results, filtered."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lt_trainer.config.fields import flatten
from lt_trainer.config.recipe import from_dict, to_dict, to_toml
from lt_trainer.release.data_files import store_names
from lt_trainer.release.facts import Facts
from lt_trainer.release.filtering import TextFilter
from lt_trainer.release.task_files import TaskEntry, recipe_fields

RUN_DIR = "reproduced"
"""run.dir of the released recipe."""
LOGS = ("metrics.jsonl", "events.jsonl", "resume_check.jsonl")
RESULT_SUFFIXES = (".jsonl", ".json", ".md", ".csv", ".txt", ".html")


def bundle_recipe(table: Mapping[str, Any], tasks: Sequence[TaskEntry]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the recipe's tables with the paths of the bundle, and the changed fields.

    Nothing that it would write or send is outside of the folder in which it runs; no change has an effect on a loss.
    """
    recipe = from_dict(table, source="recipe.json")
    changed: dict[str, Any] = {"run.dir": RUN_DIR, "data.packs": "", "checkpoint.mirror_url": "", "metrics.sinks": []}
    changed |= {"checkpoint.mirror_keep_last": 0, "checkpoint.mirror_keep_every": 0}
    changed |= {field: f"data/{name}" for name, (field, _) in store_names(recipe.data).items()}
    changed |= recipe_fields(recipe.evaluation, tasks)
    values = to_dict(recipe)
    before = flatten(values)
    changed = {field: value for field, value in changed.items() if before.get(field) != value}
    for field, value in changed.items():
        *parents, last = field.split(".")
        section = values
        for name in parents:
            section = section[name]
        section[last] = value
    return values, changed


def release_recipe(
    bundle: Path, record: Mapping[str, Any], tasks: Sequence[TaskEntry], text_filter: TextFilter
) -> dict[str, Any]:
    """Write recipe/recipe.toml and recipe.json from a run's recipe.json; return the changed fields."""
    values, changed = bundle_recipe(record["recipe"], tasks)
    values = json.loads(text_filter.apply(json.dumps(values, ensure_ascii=False)))
    origins = {name: text_filter.apply(text) for name, text in record["origins"].items()}
    origins |= dict.fromkeys(changed, "release")
    folder = bundle / "recipe"
    folder.mkdir()
    (folder / "recipe.toml").write_text(to_toml(from_dict(values), origins), encoding="utf-8")
    content = {"recipe": values, "origins": origins, "unchecked": record.get("unchecked", [])}
    (folder / "recipe.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return changed


def release_logs(bundle: Path, run: Path, text_filter: TextFilter) -> None:
    """Copy environment, metrics, events and samples of the machine, filtered."""
    files = {"environment/environment.json": run / "environment.json"}
    files |= {f"run/{name}": run / name for name in LOGS}
    files |= {f"run/monitor/{path.name}": path for path in sorted(run.glob("monitor/*.jsonl"))}
    for name, path in files.items():
        if path.exists():
            target = bundle / name
            target.parent.mkdir(parents=True, exist_ok=True)
            text = path.read_text(encoding="utf-8", errors="replace")
            target.write_text(text_filter.apply(text), encoding="utf-8")


def release_results(bundle: Path, results: Sequence[Path], text_filter: TextFilter) -> None:
    """Copy evaluation results, as of `lt train evaluate`, filtered; a folder keeps its name."""
    for given in (path.resolve() for path in results if path.exists()):
        paths = [given] if given.is_file() else sorted(path for path in given.rglob("*") if path.is_file())
        for path in paths:
            if path.suffix in RESULT_SUFFIXES:
                target = bundle / "results" / path.relative_to(given.parent)
                target.parent.mkdir(parents=True, exist_ok=True)
                text = path.read_text(encoding="utf-8", errors="replace")
                target.write_text(text_filter.apply(text), encoding="utf-8")


def write_validation_results(bundle: Path, facts: Facts) -> None:
    """Write results/validation.json if the run was validated."""
    if not facts.validation:
        return
    (bundle / "results").mkdir(exist_ok=True)
    (bundle / "results" / "validation.json").write_text(validation_results(facts), encoding="utf-8")


def validation_results(facts: Facts) -> str:
    """Return the text of results/validation.json."""
    return json.dumps({"validation": [asdict(result) for result in facts.validation]}, indent=1) + "\n"


def copy_paper(bundle: Path, paper: Path) -> str:
    """Copy the research paper; return its path in the bundle."""
    (bundle / "paper").mkdir()
    shutil.copyfile(paper, bundle / "paper" / paper.name)
    return f"paper/{paper.name}"


def known_hosts(run: Path, environment: Mapping[str, Any], monitor: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the names of machines that a run's files have."""
    names = {str(environment.get("hostname", "")), str(environment.get("variables", {}).get("MASTER_ADDR", ""))}
    names |= {str(record.get("host", "")) for record in monitor}
    names -= {"", "localhost", "127.0.0.1"}
    return names | {name.partition(".")[0] for name in names}
