"""COMMANDS.md: the commands by hand that repeat a release, from its sources to its weights."""

import json
import re
from typing import Any

from lt_data.display.terminal import quote_for_shell
from lt_trainer.release.data_files import SourceEntry
from lt_trainer.release.facts import Facts, StoreFacts
from lt_trainer.release.task_files import TASK_FOLDER

THREADS = re.compile(r"(\d+) threads")
"""Number of threads in a run's start event."""


def prepare_arguments(store: StoreFacts, given: dict[str, Any]) -> dict[str, Any]:
    """Return the options of `lt_data.prepare` that made a store."""
    manifest = store.manifest
    arguments: dict[str, Any] = {
        "bos": manifest["bos"],
        "eos": manifest["eos"],
        "special_tokens_as": manifest["special_tokens_as"],
        "shard_tokens": manifest["shard_tokens"],
        "selection": manifest["selection"],
        "keep": [f"{column['name']}:{column['type']}" for column in manifest.get("columns", [])],
        **given,
    }
    if manifest.get("map"):
        arguments["record_map"] = manifest["map"]["function"]
        arguments["map_args"] = manifest["map"]["arguments"]
    return arguments


def command_page(facts: Facts) -> str:
    """Return COMMANDS.md."""
    python = facts.environment.get("python", "")
    lines = [
        "# The commands by hand",
        "",
        "In an empty folder, with this release as `$RELEASE`. `lt release reproduce` does the same and compares.",
        "",
        "```",
        f"uv venv --python {quote(python)} env",
        "uv pip install --python env/bin/python -r $RELEASE/environment/requirements.txt",
        "uv pip install --python env/bin/python --no-deps $RELEASE/wheels/*.whl",
    ]
    for store in facts.stores:
        entries = [entry for entry in facts.sources if entry.store == store.name]
        lines += [_prepare_command(store, entries, dict(facts.info.prepare.get(store.name, {}))), _pack_command(store)]
    if any(task.file for task in facts.tasks):
        lines.append(f"cp -r $RELEASE/{TASK_FOLDER} {TASK_FOLDER}")
    variables = "".join(f"{name}={quote(value)} " for name, value in thread_variables(facts).items())
    lines += [
        f"{variables}env/bin/lt train run $RELEASE/recipe/recipe.toml",
        f"env/bin/lt ckpt export {quote(facts.recipe['run']['dir'])} --out model",
        "```",
    ]
    if any(not entry.file for entry in facts.sources):
        lines += ["", "Sources that are not in `$RELEASE/sources` must be obtained first: see DATA_CARD.md."]
    return "\n".join(lines) + "\n"


def quote(text: object) -> str:
    """Return a word of a command line of bash that is this text, in one line."""
    return quote_for_shell(str(text))


def thread_variables(facts: Facts) -> dict[str, str]:
    """Return the variables of the run's environment that a rerun on a CPU depends on.

    Where the number of threads was torch's own choice, it is that which the run has recorded.
    """
    recorded = facts.environment.get("variables", {})
    threads = THREADS.search(str(facts.start_event.get("peak_source", "")))
    chosen = {"OMP_NUM_THREADS": threads[1]} if threads is not None else {}
    return chosen | {
        name: recorded[name]
        for name in ("ATEN_CPU_CAPABILITY", "MKL_NUM_THREADS", "OMP_NUM_THREADS")
        if name in recorded
    }


def _prepare_command(store: StoreFacts, entries: list[SourceEntry], given: dict[str, Any]) -> str:
    arguments = prepare_arguments(store, given)
    words = ["env/bin/lt", "data", "prepare"]
    words += [f"$RELEASE/{quote(entry.file)}" if entry.file else _quote_path(entry.path) for entry in entries]
    words += ["--tokenizer", f"$RELEASE/data/{quote(store.name)}/tokenizer", "--out", f"data/{quote(store.name)}"]
    words += [] if arguments["bos"] else ["--no-bos"]
    words += [] if arguments["eos"] else ["--no-eos"]
    words += ["--special-tokens-as", quote(arguments["special_tokens_as"])]
    words += ["--shard-tokens", quote(arguments["shard_tokens"])]
    names = {"min_characters": "min-chars", "max_characters": "max-chars"}
    for name, value in arguments["selection"].items():
        if value is True:
            words.append("--drop-duplicates")
        elif value:
            words += [quote(f"--{names.get(name, name.replace('_', '-'))}"), quote(value)]
    for column in arguments["keep"]:
        words += ["--keep", quote(column)]
    for name in ("text_field", "tokens_field", "on_bad", "max_document_bytes"):
        if name in given:
            words += [f"--{name.replace('_', '-')}", quote(given[name])]
    if "record_map" in arguments:
        words += ["--map", quote(arguments["record_map"]), "--map-args", quote(json.dumps(arguments["map_args"]))]
    return " ".join(words)


def _quote_path(path: str) -> str:
    return quote(f"./{path}" if path.startswith("-") else path)


def _pack_command(store: StoreFacts) -> str:
    pack = store.pack
    shortest = f" --min-seq-len {min(length for length, _ in pack['buckets'])}" if pack["mode"] == "buckets" else ""
    return (
        f"env/bin/lt data pack data/{quote(store.name)} --seq-len {quote(pack['seq_len'])} "
        f"--mode {quote(pack['mode'])}{shortest}"
    )
