"""FSDP communication schedule of a step with several micro-batches.

Gradients are reduced either once per step, after the last micro-batch: until then each rank keeps them unsharded, in
the master dtype; or after every micro-batch (`reduce_each_micro_batch`): each rank keeps only its shard, and the shards
are still summed over replicas once per step. Weights not resharded after the forward pass
(`reshard_after_forward = false`) stay gathered until the step's last backward pass.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from lt_trainer_gpu.options import GpuOptions


class FsdpSync:
    """Per-micro-batch settings of a stage that is sharded or replicated.

    Args:
        model: the stage, under FSDP.
        options: the engine's options.
    """

    def __init__(self, model: nn.Module, options: GpuOptions) -> None:
        self._root: Any = model
        self._options = options

    def on_backward_begin(self, *, is_last: bool) -> None:
        """Set gradient sync for the next backward pass; `is_last` marks the step's last micro-batch."""
        if self._options.reduce_each_micro_batch:
            self._root.set_requires_all_reduce(is_last)
        else:
            self._root.set_requires_gradient_sync(is_last)
        if not self._options.reshard_after_forward:
            self._root.set_reshard_after_backward(is_last)

    def reshard_params(self) -> None:
        """Free gathered weights.

        Without a backward pass FSDP keeps weights that are not resharded after the forward pass, and a later forward
        would use them even after the sharded ones have been overwritten.
        """
        for module in self._root.modules():
            if hasattr(module, "reshard"):
                module.reshard()
