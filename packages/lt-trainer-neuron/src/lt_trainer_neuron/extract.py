"""One rank of `lt train precompile`: a few steps of the recipe on random rows, so that their graphs are seen.

`neuron_parallel_compile` runs this with NEURON_EXTRACT_GRAPHS_ONLY set: graphs are written down, nothing is computed,
and the numbers that come back mean nothing. So no data is read, nothing is saved and no number is looked at. The rows
have the recipe's shapes (in validation one micro-batch at a time), and the options are the run's own. With pipeline
stages a rank sees the graphs of its own stage, so all ranks of the run go through the steps. Started as
`python -m lt_trainer_neuron.extract RUN.toml --steps 3 [--set A.B=C ...] [--hyperparameters FILE]`.

Cost: the start of a run and `steps` times the tracing of a step.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

from lt_trainer.batches import open_batches
from lt_trainer.bench import bench_recipe
from lt_trainer.engine import StepBatch
from lt_trainer.hyperparameters import read
from lt_trainer.recipe import Resolved
from lt_trainer.run import Plan

__all__ = ["extract", "main"]


def extract(resolved: Resolved, *, steps: int, evaluate: bool) -> int:
    """Go through `steps` steps, and with `evaluate` one evaluation; returns how many calls that were.

    Args:
        resolved: the recipe with random rows (`lt_trainer.bench.bench_recipe`).
        steps: how many; the first differ, so at least 2.
        evaluate: whether the run will validate.
    """
    plan = Plan.make(resolved, os.environ)
    engine = plan.open_engine()
    try:
        with closing(open_batches(plan.recipe, plan.data, engine.topology, engine.control)) as batches:
            for _ in range(steps):
                engine.read([engine.step(batches.next_batch(), plan.recipe.optimizer.lr)])
            if evaluate:
                engine.evaluate([_first_micro_batch(batches.next_batch())])
    finally:
        engine.close()
    return steps + evaluate


def _first_micro_batch(batch: StepBatch) -> StepBatch:
    """A batch as validation has them, [1, B, T]: the number of micro-batches is a shape of that graph."""
    arrays = {name: getattr(batch, name)[:1] for name in ("input_ids", "labels", "position_ids", "doc_ids")}
    return replace(batch, **arrays)


def main(arguments: Sequence[str]) -> int:
    """Parse the command line and go through the steps."""
    parser = argparse.ArgumentParser(prog="python -m lt_trainer_neuron.extract")
    parser.add_argument("recipe")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--evaluate", action="store_true")
    parser.add_argument("--set", dest="sets", action="append", default=[])
    parser.add_argument("--hyperparameters")
    given = parser.parse_args(arguments)
    hyperparameters = read(given.hyperparameters) if given.hyperparameters else None
    resolved = bench_recipe(given.recipe, "", sets=given.sets, hyperparameters=hyperparameters)
    extract(resolved, steps=given.steps, evaluate=given.evaluate)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
