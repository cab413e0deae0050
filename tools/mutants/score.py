"""The score of both sets as a page: `score.md`, from the results of the last runs."""

from __future__ import annotations

import platform
import tomllib
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mutant import FOLDER, SETS, Mutant, read_set

PAGE = FOLDER / "score.md"
EXPLAINED = FOLDER / "survivors.toml"
"""Why a survivor is one, by id; it stays a survivor."""


NOT_RUN = {"caught_by": "", "message": "not run", "commit": "", "seconds": 0.0}


def write_score(results: Mapping[str, Mapping[str, Any]], page: Path = PAGE) -> None:
    """Write the page; a mutant without a result, or changed since, counts as not caught."""
    sets = {name: read_set(name) for name in SETS}
    known = {
        mutant.id: results[mutant.id] if results.get(mutant.id, {}).get("digest") == mutant.digest else NOT_RUN
        for mutants in sets.values()
        for mutant in mutants
    }
    reasons = tomllib.loads(EXPLAINED.read_text(encoding="utf-8")) if EXPLAINED.exists() else {}
    lines = ["# Score of the mutants", "", *describe(sets, known), ""]
    for name, mutants in sets.items():
        lines += [f"## {name.capitalize()}", "", *table(mutants, known), ""]
        lines += [*survivors(mutants, known, reasons), ""]
    page.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def describe(sets: Mapping[str, list[Mutant]], results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the totals and what they were measured on."""
    ids = [mutant.id for mutants in sets.values() for mutant in mutants]
    commits = sorted({results[i]["commit"][:10] for i in ids} - {""})
    by_name = sum(results[i].get("tests", (1,))[0] == 0 for i in ids)
    minutes = sum(results[i]["seconds"] for i in ids) / 60
    lines = []
    for name, mutants in sets.items():
        caught = sum(bool(results[m.id]["caught_by"]) for m in mutants)
        lines.append(f"- {name}: {caught} of {len(mutants)} caught ({100 * caught / len(mutants):.1f} %)")
    return [
        *lines,
        "",
        f"`uv run python tools/mutants/run.py`, {datetime.now(UTC):%Y-%m-%d}, Python {platform.python_version()}, "
        f"{minutes:.0f} minutes of runs; code of {'commit' if len(commits) == 1 else 'commits'} {', '.join(commits)}.",
        f"Tests of {by_name} mutants were chosen by name, since the map of lines had none for them.",
        "A survivor with an explanation counts as a survivor.",
    ]


def table(mutants: list[Mutant], results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the counts by package."""
    lines = ["| Package | Mutants | Caught |", "| --- | --- | --- |"]
    for package in sorted({mutant.package for mutant in mutants}):
        own = [mutant for mutant in mutants if mutant.package == package]
        lines.append(f"| {package} | {len(own)} | {sum(bool(results[m.id]['caught_by']) for m in own)} |")
    return lines


def survivors(mutants: list[Mutant], results: Mapping[str, Mapping[str, Any]], reasons: Mapping[str, str]) -> list[str]:
    """Return the survivors with what explains them."""
    left = [mutant for mutant in mutants if not results[mutant.id]["caught_by"]]
    if not left:
        return ["No survivors."]
    lines = ["Survivors:", ""]
    for m in left:
        reason = reasons.get(m.id, results[m.id]["message"].partition("\n")[0] or "no test fails")
        lines.append(f"- `{m.id}`, {m.why} in `{m.scope or 'module'}` of `{m.file}`: {reason}")
    return lines
