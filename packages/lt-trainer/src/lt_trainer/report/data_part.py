"""What a run read, for the page: each of its stores as `lt data report` shows it, and how far the run has come in it.

A store that is not where the recipe says is named, and the page goes on. Cost: O(documents) per store; no token is
read.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from lt_data import DataError, TokenStore, stats
from lt_data.showing.report import sections
from lt_trainer.report.drawing import facts
from lt_trainer.report.reading import History


def data_part(run: History) -> str:
    """The section about the data, as HTML."""
    data = run.tables.get("data", {})
    about = facts(_position(run, data))
    folders = stores(data)
    if not folders:
        kind = "a loader of the user's own" if data.get("loader") else "random rows" if data.get("synthetic") else ""
        return about + (f"<p>The rows came from {kind}: no token store to show.</p>" if kind else "")
    return about + "".join(_store(name, folder) for name, folder in folders.items())


def stores(data: Mapping[str, Any]) -> dict[str, str]:
    """The stores that a recipe's data section names: folder by what it is for."""
    found = {"Training data": data.get("store", "")}
    found |= {f"Source {name}": one["store"] for name, one in data.get("mixture", {}).items()}
    found |= {"Validation data": data.get("validation", "")}
    found |= {f"Validation set {name}": one["store"] for name, one in data.get("validation_sets", {}).items()}
    return {name: folder for name, folder in found.items() if folder}


def _position(run: History, data: Mapping[str, Any]) -> list[tuple[str, str]]:
    event = run.data
    rows = [("rows", f"{data.get('seq_len', 0):,} positions, packed as {data.get('pack', '')}")] if data else []
    if event:
        ranks = event.get("dp_size", 1)
        rows.append(
            ("update", f"{event.get('global_batch', 0):,} rows over {ranks} data-parallel rank{'s' * (ranks != 1)}")
        )
        if event.get("ramp"):
            rows.append(("the batch grows", str(event["ramp"])))
        elif run.step >= event.get("step", 0):
            read = event["row"] + (run.step - event["step"]) * event["global_batch"]
            rows.append(("read so far", f"{read:,} rows, {read * data.get('seq_len', 0):,} positions"))
        for begin, end in event.get("skipped", []):
            rows.append(("jumped over", f"rows {begin:,} to {end - 1:,}"))
        rows += [("seed of the order", str(event.get("seed", ""))), ("fingerprint", str(event.get("fingerprint", "")))]
    return rows


def _store(name: str, folder: str) -> str:
    title = f"<h3>{escape(name)} <small>{escape(folder)}</small></h3>"
    if not Path(folder).exists():
        return f"{title}<p>The store is not at this path (looked for from {escape(str(Path.cwd()))}).</p>"
    try:
        store = TokenStore.open(folder)
        shown = sections(stats(store), store.manifest, level=4)
    except DataError as exc:
        return f"{title}<p>The store cannot be read: {escape(str(exc))}</p>"
    opened = " open" if name == "Training data" else ""
    return f"<details{opened}><summary>{escape(name)}: {escape(folder)}</summary>{shown}</details>"
