"""Loss curves of gpu.py: the engine trains on a Markov chain, to compare dtypes by what they learn.

Each of 256 ids has 4 equally likely successors, drawn from a fixed seed; rows and weights are drawn from the seed of
the curve. So the loss falls from ln(vocabulary) towards ln 4 within some hundred steps, and curves of several seeds
show what is noise. Cost: an opening of the engine and `curve_steps` steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

N_IDS, N_SUCCESSORS = 256, 4
LEARNING_RATE, WARMUP_STEPS = 3e-4, 20


def chain_rows(seed: int, rows: int, length: int) -> np.ndarray:
    """Return ids [1, rows, length] of the chain."""
    import numpy as np

    successors = np.random.default_rng(0).integers(0, N_IDS, (N_IDS, N_SUCCESSORS), dtype=np.int32)
    rng = np.random.default_rng(seed)
    ids = np.empty((1, rows, length), np.int32)
    ids[..., 0] = rng.integers(0, N_IDS, (1, rows))
    choices = rng.integers(0, N_SUCCESSORS, (1, rows, length))
    for at in range(1, length):
        ids[..., at] = successors[ids[..., at - 1], choices[..., at]]
    return ids


def measure_losses(spec: dict[str, Any]) -> dict[str, Any]:
    """Train from the weights of `curve_seed`; return the losses of all steps and the mean of the last tenth."""
    from gpu_worker import batch_of_rows, model_config, open_engine, prepare_recipe

    seed = spec["curve_seed"]
    recipe = prepare_recipe(spec | {"sets": [*spec["sets"], f"run.seed={seed}"]})
    engine = open_engine(recipe, model_config(spec, recipe))
    pendings = []
    for step in range(spec["curve_steps"]):
        ids = chain_rows(seed * 2**20 + step, spec["micro_batch_size"], spec["seq_len"] + 1)
        lr = LEARNING_RATE * min(1, (step + 1) / WARMUP_STEPS)
        pendings.append(engine.step(batch_of_rows(ids, document_tokens=0), lr))
    losses = [metrics.loss for metrics in engine.fetch_metrics(pendings)]
    resolved = dict(engine.device.resolved)
    engine.close()
    tail = losses[-max(1, len(losses) // 10) :]
    return {"status": "ok", "resolved": resolved, "tail": sum(tail) / len(tail), "losses": losses}
