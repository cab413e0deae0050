"""When FSDP moves weights and gradients between ranks in a step of several micro-batches.

Gradients of one step may be reduced once, after the last micro-batch: until then each rank keeps them whole, in the
master dtype. Or after every micro-batch (`reduce_each_micro_batch`): each rank keeps its shard alone, and the shards
are still summed over replicas only once. Weights that are not let go of after the forward pass
(`reshard_after_forward = false`) stay until the step's last backward pass.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from lt_trainer_gpu.options import GpuOptions


class GradientSync:
    """Tells a model that may be sharded by FSDP what to do in the next backward pass.

    Args:
        model: after `parallelize`.
        options: the engine's.
    """

    def __init__(self, model: nn.Module, options: GpuOptions) -> None:
        # A plain model has nothing to be told, and asking FSDP's own class would import it.
        self._root: Any = model if hasattr(model, "set_requires_gradient_sync") else None
        self._sharded: list[Any] = [module for module in model.modules() if hasattr(module, "reshard")]
        self._options = options

    def before_backward(self, *, last: bool) -> None:
        """Call before each micro-batch's backward pass; `last` is the step's last one."""
        if self._root is None:
            return
        if self._options.reduce_each_micro_batch:
            self._root.set_requires_all_reduce(last)
        else:
            self._root.set_requires_gradient_sync(last)
        if not self._options.reshard_after_forward:
            self._root.set_reshard_after_backward(last)

    def after_evaluation(self) -> None:
        """Let go of gathered weights.

        Without a backward pass FSDP keeps those that are not let go of after the forward pass, and a later forward
        would use them even after others have been put in their place.
        """
        for module in self._sharded:
            module.reshard()
