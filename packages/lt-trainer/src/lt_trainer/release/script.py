"""reproduce.sh: the commands that repeat a run, from its sources to its weights.

A store that was prepared from files at once is prepared again; sources that are not in the release are expected in the
current folder, under the name that data/sources.jsonl has. One that was joined, split or appended to is taken from the
release if its tokens are in it. What cannot be repeated makes the script end at once and say why.
"""

import re
from pathlib import PurePosixPath

from lt_data.display.terminal import quote_for_shell
from lt_trainer.release.bundle import RUN_DIR
from lt_trainer.release.facts import Facts, StoreFacts
from lt_trainer.toml import format_value

THREADS = re.compile(r"(\d+) threads")
"""Number of threads in a run's start event."""
THREAD_VARIABLES = ("ATEN_CPU_CAPABILITY", "MKL_NUM_THREADS", "OMP_NUM_THREADS")
HEAD = """\
#!/usr/bin/env bash
# Repeats the run of this release in the current folder; with STEPS only its first steps.
# Usage: bash RELEASE/reproduce.sh [STEPS]. `lt` must be on the PATH: see source/, or use `lt release reproduce`.
set -euo pipefail
release=$(cd "$(dirname "$0")" && pwd)
steps=${1:-0}
"""


def reproduction_script(facts: Facts) -> str:
    """Return reproduce.sh."""
    fields = {"data.loader": facts.recipe["data"].get("loader"), "model.init_from": facts.recipe["model"]["init_from"]}
    absent = [f"{field} = {format_value(value)} is not in the release" for field, value in fields.items() if value]
    lines = [f"echo {quote(text)} >&2; exit 1" for text in absent]
    lines += [f"export {name}={quote(value)}" for name, value in _thread_variables(facts).items()]
    lines.append("mkdir -p data")
    for store in facts.stores:
        lines += store_commands(facts, store)
    ranks = int(facts.start_event.get("world", 1))
    start = "lt train run" if ranks == 1 else f"lt train torchrun --nproc-per-node {ranks}"
    lines += [
        f'{start} "$release"/recipe/recipe.toml --stop-after-step "$steps" || [ $? = 75 ]',
        f"lt ckpt export {RUN_DIR} --out model",
    ]
    return HEAD + "\n".join(lines) + "\n"


def quote(text: object) -> str:
    """Return a word of a command line of bash that is this text, in one line."""
    return quote_for_shell(str(text))


def _thread_variables(facts: Facts) -> dict[str, str]:
    """Return the variables of the run's environment that a rerun on a CPU depends on.

    Where the number of threads was torch's own choice, it is that which the run has recorded.
    """
    recorded = facts.environment.get("variables", {})
    threads = THREADS.search(str(facts.start_event.get("peak_source", "")))
    chosen = {"OMP_NUM_THREADS": threads[1]} if threads is not None else {}
    return chosen | {name: recorded[name] for name in THREAD_VARIABLES if name in recorded}


def store_commands(facts: Facts, store: StoreFacts) -> list[str]:
    """Return the commands that make a store and its pack in data/."""
    out, manifest, pack, sources = f"data/{store.name}", store.manifest, store.pack, f"sources/{store.name}"
    is_derived = manifest.get("map") or manifest.get("split")
    is_prepared = store.sources and not is_derived and not facts.release.stores[store.name].joined
    if store.has_tokens and not (is_prepared and not any(entry.left_out for entry in store.sources)):
        return [f'cp -R "$release"/{quote(out)} data/']
    if not is_prepared:
        return [f"echo {quote(f'{store.name}: this store is not prepared again from its sources')} >&2; exit 1"]
    where, lines = f'"$release"/{quote(sources)}', list[str]()
    if not store.has_tokens:
        lines = [f"mkdir -p sources; [ ! -d {where} ] || cp -R {where} sources/"]
        where = quote(sources)
    return [
        *lines,
        " ".join([f"lt data prepare {where}", *_prepare_options(facts, store), f"--out {quote(out)}"]),
        f"lt data pack {quote(out)} --seq-len {pack['seq_len']} --mode {quote(pack['mode'])}",
    ]


def _prepare_options(facts: Facts, store: StoreFacts) -> list[str]:
    manifest = store.manifest
    tokenizer = PurePosixPath("data", store.name, manifest["parts"][0]["path"], "tokenizer")
    words = [f'--tokenizer "$release"/{quote(tokenizer)}']
    words += [] if manifest["bos"] else ["--no-bos"]
    words += [] if manifest["eos"] else ["--no-eos"]
    words += [f"--{name.replace('_', '-')} {quote(manifest[name])}" for name in ("special_tokens_as", "shard_tokens")]
    options = {**manifest["selection"], **facts.info.stores.get(store.name, {}).get("prepare", {})}
    for name, value in options.items():
        option = f"--{name.replace('characters', 'chars').replace('_', '-')}"
        words += [f"{option} {quote(value)}"] if value and value is not True else [option] if value else []
    words += [f"--keep {quote(column['name'] + ':' + column['type'])}" for column in manifest.get("columns", [])]
    words += [
        f"--suffix {quote(suffix)}" for suffix in sorted({"." + e.file.rpartition(".")[2] for e in store.sources})
    ]
    return words
