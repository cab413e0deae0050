"""Snapshots of the Trainium engine: neuronx-distributed (NxD) files inside an lt checkpoint.

    checkpoints/step-00001000/         for NxD: a tag
        model/  optim/                 a file per rank, with save_xser a file per tensor
        scheduler.pt  user_content.pt  read by NxD's training programs
        checkpoint  done               NxD's markers
        manifest.json  COMMIT ...      lt's own (`lt_ckpt`): hashes, position of every tensor, recipe, data position

`lt_ckpt.nxd.rank_writer` writes the tensor files by NxD's keys, which backends use as well; the manifest names the same
bytes by the model's tensors. Nothing in this module is needed to resume from such a checkpoint: the engine reads the
groups `weights` (master weights, if any) and the optimizer's slots from a checkpoint of any mesh and engine. NxD's own
loader reads the files, too.

Optimizer state files number the tensors as NxD's training programs do, norms and biases last; the embedding is
therefore listed in the group with weight decay, whatever the recipe sets: no reader in lt uses that entry. Norms and
matrices for which NxD's programs have no name have the model's.

Model files are written by data-parallel rank 0, optimizer states by all data-parallel ranks (without ZeRO-1 by rank 0).
Cost: with master weights, the bytes of the layers' weights in addition to the state that must be saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from lt_ckpt import Shard
from lt_ckpt.llama_tensors import MASTER_WEIGHTS as NXD_MASTER_WEIGHTS
from lt_ckpt.nxd.rank_writer import WEIGHTS, NxdRankWriter, optimizer_state_keys
from lt_ckpt.nxd.zero1 import has_decay
from lt_trainer.config.lr_schedule import learning_rate
from lt_trainer.config.recipe import engine_options
from lt_trainer.engine import Snapshot
from lt_trainer.optimizers import optimizer_spec
from lt_trainer.optimizers.driver import optimizer_record
from lt_trainer.torch import DTYPE_CODES
from lt_trainer_neuron.grid import build_nxd_options
from lt_trainer_neuron.options import NeuronOptions
from lt_trainer_neuron.row_slice import MASTER_WEIGHTS, RowSlice

if TYPE_CHECKING:
    from lt_model import ModelConfig
    from lt_trainer.config.sections import Recipe
    from lt_trainer_neuron.nxd.backend import NxdBackend


def nxd_snapshot(recipe: Recipe, config: ModelConfig, backend: NxdBackend) -> Snapshot:
    """Return a backend's state as this rank's part of an NxD checkpoint.

    Args:
        recipe: Recipe of the run.
        config: Model configuration.
        backend: Backend that holds the tensors; they are read when they are written or copied.
    """
    part = _build_nxd_part(recipe, config, backend)
    layout_metadata = {
        "files": "nxd",
        "tp": part.options.tp,
        "pp": part.options.pp,
        "dp": part.dp,
        "qkv": part.options.qkv,
        "kv_size_multiplier": part.options.kv_size_multiplier,
        "zero1": part.zero1,
        "param_groups": [dict(group) for group in part.param_group_settings],
    }
    shards = _shards(part, backend)
    return Snapshot(
        shards=shards,
        scalars={"optimizer_step": part.step},
        file_layout=part,
        layout_metadata=layout_metadata,
        optimizer=optimizer_record(optimizer_spec(recipe.optimizer.name)),
    )


def nxd_state_bytes(recipe: Recipe, backend: NxdBackend) -> int:
    """Return the bytes this rank saves to a checkpoint, without ZeRO-1's padding."""
    zero1 = engine_options(recipe, "neuron", NeuronOptions).zero1
    first = backend.grid.dp_rank == 0
    weights = sum(tensor.nbytes for tensor in backend.weights.values()) if first else 0
    slots = (
        (backend.optimizer_state[group].values() for group in _state_kinds(backend).values()) if zero1 or first else ()
    )
    return weights + sum(rows.n_bytes for group in slots for rows in group)


def _state_kinds(backend: NxdBackend) -> dict[str, str]:
    """Map NxD's kinds of state to the backend's groups.

    Master weights are left out where the layers compute with the same tensors in the same dtype.
    """
    masters = any(
        rows.dtype != backend.weights[key].dtype for key, rows in backend.optimizer_state[MASTER_WEIGHTS].items()
    )
    slots = {slot: slot for slot in backend.optimizer_state if slot != MASTER_WEIGHTS}
    return slots | ({NXD_MASTER_WEIGHTS: MASTER_WEIGHTS} if masters else {})


def _group_dtype(backend: NxdBackend, group: str) -> torch.dtype:
    """Return the dtype of a state group, which all its tensors share."""
    (dtype,) = {rows.dtype for rows in backend.optimizer_state[group].values()}
    return dtype


def _shards(part: NxdRankWriter, backend: NxdBackend) -> Iterator[Shard]:
    """Yield this rank's tensors as `part` expects them."""
    weights = backend.weights
    if part.dp_rank == 0:
        for key, tensor in weights.items():
            yield _row_shard(WEIGHTS, key, RowSlice(stored=tensor, n_rows=tensor.shape[0]), tuple(tensor.shape))
    if part.dp_rank and not part.zero1:
        return
    for kind, group in _state_kinds(backend).items():
        for key, rows in backend.optimizer_state[group].items():
            if rows.n_rows:  # otherwise this rank holds only padding
                yield _row_shard(kind, key, rows, tuple(weights[key].shape))


def _row_shard(kind: str, key: str, rows: RowSlice, shape: tuple[int, ...]) -> Shard:
    """Return rows as a shard of the tensor that they are of; copied from a device when they are written."""

    def to_bytes() -> np.ndarray:
        return rows.to_host().contiguous().view(-1).view(torch.uint8).numpy()

    return Shard(
        group=kind,
        name=key,
        dtype=DTYPE_CODES[rows.dtype],
        global_shape=shape,
        offset=(rows.start_row, *(0,) * (len(shape) - 1)),
        shape=rows.shape,
        data=to_bytes() if rows.is_on_host else to_bytes,
    )


def _build_nxd_part(recipe: Recipe, config: ModelConfig, backend: NxdBackend) -> NxdRankWriter:
    grid, nxd_options, options = backend.grid, build_nxd_options(recipe), recipe.optimizer
    keys = optimizer_state_keys(config, nxd_options, grid.tp_rank, grid.pp_rank)
    step_count = backend.step_count
    lr = learning_rate(step_count, recipe.schedule, options.lr)
    settings = [
        {
            "weight_decay": decay,
            "lr": lr,
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
    return NxdRankWriter(
        config=config,
        options=nxd_options,
        dp=grid.dp,
        dp_rank=grid.dp_rank,
        tp_rank=grid.tp_rank,
        pp_rank=grid.pp_rank,
        zero1=engine_options(recipe, "neuron", NeuronOptions).zero1,
        step=step_count,
        slots=optimizer_spec(options.name).slot_names,
        dtypes={kind: DTYPE_CODES[_group_dtype(backend, group)] for kind, group in _state_kinds(backend).items()},
        param_group_settings=settings,
        param_group_keys=tuple([key for key in keys if has_decay(key) is decay] for decay in (True, False)),
        scheduler_state={
            "base_lrs": [options.lr, options.lr],
            "last_epoch": step_count,
            "_step_count": step_count + 1,
            "_is_initial": False,
            "_get_lr_called_within_step": False,
            "_last_lr": [lr, lr],
            "lr_lambdas": [{}, {}],
        },
        user_content={"epoch": 0, "global_step": step_count, "total_steps": step_count, "cli_args": {}},
    )
