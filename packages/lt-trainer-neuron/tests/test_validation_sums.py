"""Sums over a validation set, made from numbers of a device that has 8 bits for each."""

from types import SimpleNamespace

import numpy as np
import torch

from lt_test_helpers.layouts import step_batch
from lt_trainer.control import Control
from lt_trainer_neuron.engine import NeuronEngine
from lt_trainer_neuron.grid import Grid

TOKENS, LOSS = 659, 2.5
"""Of each batch; LOSS * TOKENS is rounded on the device."""


class NarrowBackend:
    """A backend whose tensors are bfloat16, as all are on a device with `bf16_sr`."""

    def __init__(self, grid: Grid) -> None:
        self.grid, self.n_marks = grid, 0

    def validate(self, batch: object) -> torch.Tensor:
        return torch.tensor(LOSS * TOKENS, dtype=torch.bfloat16)

    def mark_step(self) -> None:
        self.n_marks += 1

    def fetch_scalars(self, values: list[torch.Tensor]) -> list[float]:
        return [float(value) for value in values]


def summed(grid: Grid, control: object) -> tuple[float, int]:
    ids = np.zeros((1, 1, 4), np.int32)
    batch = step_batch(input_ids=ids, labels=ids, position_ids=ids, doc_ids=ids, valid_tokens=TOKENS)
    engine = object.__new__(NeuronEngine)
    vars(engine).update(backend=NarrowBackend(grid), control=control)
    return engine.validate([batch] * 30)


def test_counts_are_exact_and_losses_are_added_in_float64() -> None:
    rounded = float(torch.tensor(LOSS * TOKENS, dtype=torch.bfloat16))
    assert summed(Grid(), Control()) == (30 * rounded, 19770)  # 19770 is 19712 in bfloat16


def test_only_the_last_stage_of_each_tensor_parallel_group_counts() -> None:
    ranks = [Grid(tp=2, pp=2, dp=2, tp_rank=t, pp_rank=p, dp_rank=d) for p in (0, 1) for d in (0, 1) for t in (0, 1)]
    given = []
    for grid in ranks:
        summed(grid, SimpleNamespace(all_gather=lambda value: given.append(value) or [value]))
    assert [count for _, count in given] == [0, 0, 0, 0, 19770, 0, 19770, 0]
    _, tokens = summed(ranks[0], SimpleNamespace(all_gather=lambda value: given))
    assert tokens == 2 * 19770
