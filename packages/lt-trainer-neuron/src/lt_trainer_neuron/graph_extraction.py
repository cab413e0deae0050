"""Graph extraction of one rank for `lt train precompile`: a few steps on random rows.

`neuron_parallel_compile` runs this with NEURON_EXTRACT_GRAPHS_ONLY set: graphs are written, nothing is computed, and
returned values are meaningless. So no data is read, nothing is saved and no value is used; saving and restoring have no
graphs (`row_slice.RowSlice`), and a run starts with the same ones however it gets its weights. The rows have the
recipe's shapes (in validation and evaluation one micro-batch at a time), and the options are those of the run. With
pipeline stages a rank sees only the graphs of its own stage, so all ranks of the run execute the steps. Started as
`python -m lt_trainer_neuron.graph_extraction RUN.toml --steps 3 [--set A.B=C ...] [--hyperparameters FILE]`.

Cost: the start of a run and `steps` times the tracing of a step.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

from lt_trainer.config.hyperparameters import read_hyperparameters
from lt_trainer.config.recipe import ResolvedRecipe
from lt_trainer.data.batches import open_batches
from lt_trainer.engine import StepBatch, StepParts, World
from lt_trainer.training.benchmark import resolve_bench_recipe
from lt_trainer.training.run import read_inputs


def extract_graphs(resolved: ResolvedRecipe, *, steps: int, validate: bool, evaluate: bool = False) -> int:
    """Run `steps` training steps and optionally a validation and scores; return the number of calls.

    Args:
        resolved: recipe with random rows (`lt_trainer.training.benchmark.resolve_bench_recipe`).
        steps: number of steps; the first ones have different graphs, so at least 2.
        validate: trace the validation graphs, too.
        evaluate: trace the graphs of an evaluation, too.
    """
    recipe, world = resolved.recipe, World.from_env(os.environ)
    inputs = read_inputs(resolved, world)
    with (
        closing(inputs.open_engine(recipe, world)) as engine,
        closing(open_batches(recipe, inputs.data, engine.topology, engine.control)) as batches,
    ):
        for _ in range(steps):
            engine.fetch_metrics([engine.step(batches.next_batch(), recipe.optimizer.lr)])
        if validate:
            engine.validate([_first_micro_batch(batches.next_batch())])
        if evaluate:
            engine.score(_first_micro_batch(batches.next_batch()))
    return steps + validate + evaluate


def _first_micro_batch(step: StepParts) -> StepBatch:
    """Return a batch of one micro-batch, [1, B, T], as in validation and evaluation.

    The number of micro-batches is part of the shapes of that graph.
    """
    batch = next(step.parts())
    arrays = {name: getattr(batch, name)[:1] for name in ("input_ids", "labels", "position_ids", "doc_ids")}
    return replace(batch, **arrays)


def main(arguments: Sequence[str]) -> int:
    """Parse the command line and extract the graphs."""
    parser = argparse.ArgumentParser(prog="python -m lt_trainer_neuron.graph_extraction")
    parser.add_argument("recipe")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--validate", action="store_true")
    parser.add_argument("--evaluate", action="store_true")
    parser.add_argument("--set", dest="sets", action="append", default=[])
    parser.add_argument("--hyperparameters")
    args = parser.parse_args(arguments)
    hyperparameters = read_hyperparameters(args.hyperparameters) if args.hyperparameters else None
    resolved = resolve_bench_recipe(args.recipe, "", overrides=args.sets, hyperparameters=hyperparameters)
    extract_graphs(resolved, steps=args.steps, validate=args.validate, evaluate=args.evaluate)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
