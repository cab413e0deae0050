"""Sums over a validation set, made from numbers of a device that has 8 bits for each."""

import numpy as np
import torch

from lt_test_helpers.layouts import step_batch
from lt_trainer.control import Control
from lt_trainer_neuron.engine import NeuronEngine
from lt_trainer_neuron.grid import Grid
from lt_trainer_neuron.nxd.device import TensorDevice

TOKENS, LOSS = 659, 2.5
"""Of each batch; LOSS * TOKENS is rounded on the device."""


class NarrowBackend:
    """A backend whose tensors are bfloat16, as all are on a device with `bf16_sr`."""

    def __init__(self, grid: Grid) -> None:
        self.grid, self.tensor_device = grid, TensorDevice()

    def validate(self, batch: object) -> torch.Tensor:
        return torch.tensor(LOSS * TOKENS, dtype=torch.bfloat16)


def test_counts_are_exact_and_losses_are_added_in_float64() -> None:
    """Which ranks count is seen in `test_cpu_parity.py`."""
    ids = np.zeros((1, 1, 4), np.int32)
    batch = step_batch(input_ids=ids, labels=ids, position_ids=ids, doc_ids=ids, valid_tokens=TOKENS)
    engine = object.__new__(NeuronEngine)
    vars(engine).update(backend=NarrowBackend(Grid()), control=Control())
    rounded = float(torch.tensor(LOSS * TOKENS, dtype=torch.bfloat16))
    assert engine.validate([batch] * 30) == (30 * rounded, 19770)  # 19770 is 19712 in bfloat16
