"""Layers of pipeline stages: consecutive, balanced by work. Torch-free.

Cost: one pass over the parameter table.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

from lt_model.config import ModelConfig
from lt_model.costs import active_numel
from lt_model.params import param_specs


def stage_layers(config: ModelConfig, n_stages: int) -> list[range]:
    """Return the layers of each stage, so that the slowest stage has the least work.

    The head counts as the number of layers with as many weights; the stages before the last share the other layers
    evenly, later ones get the remainder, as they hold fewer micro-batches' activations.

    Args:
        config: the model, with at least `n_stages` layers.
        n_stages: stages of all ranks.
    """
    assert config.n_layers >= n_stages
    block = sum(active_numel(row, config) for row in param_specs(config) if row.layer is not None) / config.n_layers
    head = config.vocab_size * config.hidden_size / block
    per_stage = (config.n_layers + head) / n_stages
    last = max(1, min(round(per_stage - head), config.n_layers - (n_stages - 1)))
    if n_stages == 1:
        return [range(config.n_layers)]
    least, n_larger = divmod(config.n_layers - last, n_stages - 1)
    sizes = [least + (index >= n_stages - 1 - n_larger) for index in range(n_stages - 1)]
    cuts = [0, *accumulate(sizes), config.n_layers]
    return [range(first, end) for first, end in pairwise(cuts)]
