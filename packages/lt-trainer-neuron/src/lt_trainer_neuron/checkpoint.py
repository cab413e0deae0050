"""What this engine saves: files of neuronx-distributed (NxD) in a checkpoint of ours, which NxD's own loader reads too.

    checkpoints/step-00001000/         for NxD: a tag
        model/  optim/                 a file per rank, with save_xser a file per tensor
        scheduler.pt  user_content.pt  what NxD's training programs look for
        checkpoint  done               its markers
        manifest.json  COMMIT ...      ours (`lt_ckpt`): hashes, the place of every tensor, recipe, data position

`lt_ckpt.nxd.part` makes the files of tensors by NxD's keys, which is how a backend holds them, and the manifest names
the same bytes by the model's tensors. So nothing here is needed to go on from such a checkpoint: the engine reads the
groups `weights` (masters, where there are any), `exp_avg` and `exp_avg_sq` of a checkpoint of any mesh and any engine.

In the files of states tensors have the numbers that NxD's training programs give them, the norms last; so the embedding
stands among those with weight decay, whatever the recipe says: no reader of ours looks there for it.

Model files are written by data-parallel rank 0, states by all data-parallel ranks (without ZeRO-1 by rank 0).
Cost: the bytes of the layers' weights more than what has to be saved, where there are masters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from lt_ckpt.nxd.part import WEIGHTS, NxdPart, stateful_keys
from lt_ckpt.nxd.zero import MASTER
from lt_trainer.engine import Snapshot
from lt_trainer.recipe import engine_options
from lt_trainer.schedule import lr
from lt_trainer.torch import DTYPE_CODES, Part, as_shard
from lt_trainer_neuron.backend import MASTERS, MOMENTS, Backend
from lt_trainer_neuron.grid import cut_of
from lt_trainer_neuron.options import NeuronOptions

if TYPE_CHECKING:
    from lt_ckpt import Shard
    from lt_model import LlamaConfig
    from lt_trainer.recipe import Recipe

__all__ = ["nxd_snapshot", "nxd_state_bytes"]


def nxd_snapshot(recipe: Recipe, config: LlamaConfig, backend: Backend) -> Snapshot:
    """The state of a backend, as this rank's part of an NxD checkpoint.

    Args:
        recipe: The run's.
        config: The model.
        backend: Which holds the tensors; they are read when they are written, or copied.
    """
    part = _part(recipe, config, backend)
    about = {
        "files": "nxd",
        "tp": part.options.tp,
        "pp": part.options.pp,
        "dp": part.dp,
        "qkv": part.options.qkv,
        "kv_multiplier": part.options.kv_multiplier,
        "zero1": part.zero1,
        "param_groups": [dict(group) for group in part.settings],
    }
    shards = _shards(part, backend)
    return Snapshot(shards=shards, small={"optimizer_step": part.step}, layout=part, about=about)


def nxd_state_bytes(recipe: Recipe, backend: Backend) -> int:
    """Bytes of what this rank gives to a checkpoint, without ZeRO-1's padding."""
    zero1 = engine_options(recipe, "neuron", NeuronOptions).zero1
    first = backend.grid.dp_rank == 0
    weights = sum(tensor.nbytes for tensor in backend.weights.values()) if first else 0
    slots = (backend.slots[group].values() for group in _kinds(backend).values()) if zero1 or first else ()
    return weights + sum(rows.local.nbytes for group in slots for rows in group)


def _kinds(backend: Backend) -> dict[str, str]:
    """NxD's kinds of state → the backend's groups; no masters where the layers compute with those very numbers."""
    masters = any(rows.local.dtype != backend.weights[key].dtype for key, rows in backend.slots[MASTERS].items())
    return {**{kind: kind for kind in MOMENTS}, **({MASTER: MASTERS} if masters else {})}


def _dtype(backend: Backend, group: str) -> torch.dtype:
    """The dtype of a group of the state, which is one for all its tensors."""
    (dtype,) = {rows.local.dtype for rows in backend.slots[group].values()}
    return dtype


def _shards(part: NxdPart, backend: Backend) -> Iterator[Shard]:
    """This rank's tensors as `part` takes them."""
    weights = backend.weights
    if part.dp_rank == 0:
        for key, tensor in weights.items():
            shard = as_shard(WEIGHTS, key, tensor)
            assert shard is not None, f"{key} has elements"
            yield shard
    if part.dp_rank and not part.zero1:
        return
    for kind, group in _kinds(backend).items():
        for key, rows in backend.slots[group].items():
            shape = tuple(weights[key].shape)
            whole = Part(local=rows.local, shape=shape, offset=(rows.first, *(0,) * (len(shape) - 1)))
            shard = as_shard(kind, key, whole)
            if shard is not None:  # else this rank has padding alone
                yield shard


def _part(recipe: Recipe, config: LlamaConfig, backend: Backend) -> NxdPart:
    grid, cut, options = backend.grid, cut_of(recipe), recipe.optimizer
    keys = stateful_keys(config, cut, grid.tp_rank, grid.pp_rank)
    steps = backend.steps
    rate = lr(steps, recipe.schedule, options.lr)
    settings = [
        {
            "weight_decay": decay,
            "lr": rate,
            "betas": [options.beta1, options.beta2],
            "eps": options.eps,
            "initial_lr": options.lr,
            "amsgrad": False,
            "maximize": False,
            "foreach": None,
            "capturable": False,
            "differentiable": False,
            "fused": None,
            "decoupled_weight_decay": True,
        }
        for decay in (options.weight_decay, 0.0)
    ]
    return NxdPart(
        config=config,
        options=cut,
        dp=grid.dp,
        dp_rank=grid.dp_rank,
        tp_rank=grid.tp_rank,
        pp_rank=grid.pp_rank,
        zero1=engine_options(recipe, "neuron", NeuronOptions).zero1,
        step=steps,
        dtypes={kind: DTYPE_CODES[_dtype(backend, group)] for kind, group in _kinds(backend).items()},
        settings=settings,
        groups=([key for key in keys if "norm" not in key], [key for key in keys if "norm" in key]),
        scheduler={
            "base_lrs": [options.lr, options.lr],
            "last_epoch": steps,
            "_step_count": steps + 1,
            "_is_initial": False,
            "_get_lr_called_within_step": False,
            "_last_lr": [rate, rate],
            "lr_lambdas": [{}, {}],
        },
        user_content={"epoch": 0, "global_step": steps, "total_steps": steps, "cli_args": {}},
    )
