"""Counts the graphs that torch-xla compiles for `lt train precompile`, and after it for runs of the same recipe.

A recipe has "sets". In a process a graph is compiled once: what a later part compiles is new.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch_xla
import torch_xla.debug.metrics as met

from lt_data import Tokenizer, TokenStore, pack, prepare
from lt_data.sources.reader import read_documents
from lt_test_helpers.harness_tasks import write_task
from lt_test_helpers.runs import run
from lt_test_helpers.xla_processes import run_forks
from lt_trainer.config.recipe import load
from lt_trainer.training.benchmark import resolve_bench_recipe
from lt_trainer_neuron.graph_extraction import extract_graphs
from lt_trainer_neuron.row_slice import RowSlice

RECIPE = """
[run]
dir = "{folder}/{name}"
engine = "neuron"
[model]
hidden_size = 32
intermediate_size = 40
n_heads = 4
n_kv_heads = 2
n_layers = 2
[data]
store = "{folder}/store"
validation = "{folder}/store"
seq_len = 32
[batch]
global_batch_size = 6
micro_batch_size = 2
[schedule]
max_steps = 8
warmup_steps = 2
[checkpoint]
interval = 3
[metrics]
log_interval = 1
validation_interval = 4
[evaluation]
tasks = ["recall"]
include_path = "{folder}/tasks"
interval = 4
limit = 9
[engine.neuron]
backend = "xla"
num_neuroncores = 1
"""


def make_store(folder: Path) -> None:
    """Write text, tokenizer, packed store and a task."""
    (folder / "text").mkdir()
    for number in range(40):
        (folder / "text" / f"{number}.txt").write_text("the loss falls when data is read in order " * (2 + number % 9))
    tokenizer = Tokenizer.train((document.text for document in read_documents([folder / "text"])), vocab_size=270)
    prepare([folder / "text"], tokenizer=tokenizer, out=folder / "store")
    pack(TokenStore(folder / "store"), seq_len=32)
    write_task(folder / "tasks", "recall", [{"context": "the loss falls when", "target": " data"}] * 9)


def count(folder: Path, name: str, sets: list[str]) -> dict[str, list[int]]:
    """Return exit code and compiled graphs of each part."""
    path, counted = folder / f"{name}.toml", {}
    path.write_text(RECIPE.format(folder=folder, name=name))

    def part(what: str, work: Callable[[], int]) -> None:
        before = met.counter_value("UncachedCompile") or 0
        code = work()
        counted[what] = [code, (met.counter_value("UncachedCompile") or 0) - before]

    bench = resolve_bench_recipe(str(path), "", overrides=sets, hyperparameters=None)
    part("precompile", lambda: extract_graphs(bench, steps=3, validate=True, evaluate=True))
    part("run", lambda: run(load(path, overrides=sets), stop_after_step=5))
    part("resume", lambda: run(load(path, overrides=sets)))
    other = [f"run.dir={folder}/{name}-2", f"model.init_from={folder}/{name}", "schedule.max_steps=3"]
    part("init_from", lambda: run(load(path, overrides=[*sets, *other])))
    part("padding", move_padded_rows)
    return counted


def move_padded_rows() -> int:
    """Store rows in a tensor with ZeRO-1's padding, and read them; returns 0 if they are the same."""
    rows = RowSlice(stored=torch.zeros(5, 3).to(torch_xla.device()), n_rows=4)
    given = torch.arange(12.0).reshape(4, 3)
    rows.store(given)
    torch_xla.sync()
    padded = rows.stored.cpu()
    return 0 if torch.equal(rows.to_host(), given) and not padded[4].any() else 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    make_store(Path(sys.argv[1]))
    run_forks(partial(count, Path(sys.argv[1])))
