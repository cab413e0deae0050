"""Data section of the report: the run's position and each store as in `lt data report`.

A store that does not exist at the recipe's path is reported in the page. Cost: O(documents) per store; reads no tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from lt_data import DataError, TokenStore, stats
from lt_data.display.report import render_sections
from lt_trainer.observability.report.html_charts import key_value_table
from lt_trainer.observability.report.run_history import RunHistory


def data_section(run: RunHistory) -> str:
    """Return the data section as HTML."""
    data = run.recipe_table.get("data", {})
    position = key_value_table(_position(run, data))
    folders = named_stores(data)
    if not folders:
        kind = "a custom loader" if data.get("loader") else "synthetic rows" if data.get("synthetic") else ""
        return position + (f"<p>Training data: {kind}, no token store.</p>" if kind else "")
    return position + "".join(_store(name, folder, data.get("packs", "")) for name, folder in folders.items())


def named_stores(data: Mapping[str, Any]) -> dict[str, str]:
    """Return the store folders in a recipe's data section, by title."""
    folders = {"Training data": data.get("store", "")}
    folders |= {f"Source {name}": source["store"] for name, source in data.get("mixture", {}).items()}
    folders |= {"Validation data": data.get("validation", "")}
    folders |= {f"Validation set {name}": entry["store"] for name, entry in data.get("validation_sets", {}).items()}
    return {title: folder for title, folder in folders.items() if folder}


def _position(run: RunHistory, data: Mapping[str, Any]) -> list[tuple[str, str]]:
    event = run.data_event
    rows = [("rows", f"{data.get('seq_len', 0):,} positions, packed as {data.get('packing', '')}")] if data else []
    if event:
        ranks = event.get("dp_size", 1)
        rows.append(
            (
                "step",
                f"{event.get('global_batch_size', 0):,} rows over {ranks} data-parallel rank{'s' * (ranks != 1)}",
            )
        )
        if event.get("ramp"):
            rows.append(("batch ramp", str(event["ramp"])))
        elif run.step >= event.get("step", 0):
            read = event["row"] + (run.step - event.get("step", 0)) * event.get("global_batch_size", 0)
            rows.append(("read so far", f"{read:,} rows, {read * data.get('seq_len', 0):,} positions"))
        for begin, end in event.get("skipped", []):
            rows.append(("skipped", f"rows {begin:,} to {end - 1:,}"))
        rows += [("shuffle seed", str(event.get("seed", ""))), ("fingerprint", str(event.get("fingerprint", "")))]
    return rows


def _store(name: str, folder: str, packs: str) -> str:
    title = f"<h3>{escape(name)} <small>{escape(folder)}</small></h3>"
    if not Path(folder).exists():
        return f"{title}<p>No store at this path (relative to {escape(str(Path.cwd()))}).</p>"
    try:
        store = TokenStore.open(folder, packs=packs)
        sections = render_sections(stats(store), store.manifest, level=4)
    except DataError as exc:
        return f"{title}<p>The store cannot be read: {escape(str(exc))}</p>"
    open_attribute = " open" if name == "Training data" else ""
    return f"<details{open_attribute}><summary>{escape(name)}: {escape(folder)}</summary>{sections}</details>"
