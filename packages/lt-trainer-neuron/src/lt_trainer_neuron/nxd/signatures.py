"""Signatures of the neuronx-distributed (NxD) callables in use, as data read from NxD's source.

The tests compare our calls with `SIGNATURES`. At start `check_nxd_signatures` verifies that the installed package
accepts the keyword arguments in use: a release without `reduce_dtype`, for example, would sum gradients differently,
and is rejected before anything is loaded on a device.

Cost: the modules are imported, which training needs anyway.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping

from lt_trainer_neuron.sdk import NotInstalledError

__all__ = ["NXD_VERSION", "REQUIRED_ARGUMENTS", "SIGNATURES", "check_nxd_signatures"]

NXD_VERSION = "0.18.0"
"""NxD release whose source the signatures were read from."""

SIGNATURES: Mapping[str, str] = {
    "parallel_layers.layers.ParallelEmbedding": (
        "num_embeddings embedding_dim padding_idx= max_norm= norm_type= scale_grad_by_freq= sparse= "
        "init_method= device= dtype= shard_across_embedding= pad= sequence_parallel_enabled= "
        "tensor_model_parallel_group= use_spmd_rank= sequence_dimension= tile_cc= rank_ordering= "
        "collect_output="
    ),
    "parallel_layers.layers.ColumnParallelLinear": (
        "input_size output_size bias= gather_output= dtype= device= stride= init_method= "
        "sequence_parallel_enabled= sequence_dimension= keep_master_weight= skip_bias_add= pad= "
        "pad_alignment_size_per_rank= keep_padded_output= tensor_model_parallel_group= reduce_dtype= "
        "rank_ordering="
    ),
    "parallel_layers.layers.RowParallelLinear": (
        "input_size output_size bias= input_is_parallel= dtype= device= stride= init_method= "
        "sequence_parallel_enabled= sequence_dimension= keep_master_weight= skip_bias_add= pad= "
        "reduce_output= tensor_model_parallel_group= reduce_dtype= tile_cc= rank_ordering="
    ),
    "modules.qkv_linear.GQAQKVColumnParallelLinear": (
        "input_size output_sizes bias= gather_output= dtype= device= init_method= sequence_parallel_enabled= "
        "keep_master_weight= kv_size_multiplier= fuse_qkv= reduce_dtype="
    ),
    "parallel_layers.comm.reduce_scatter": (
        "reduce_type input scale scatter_dim shard_count groups= output= pin_layout="
    ),
    "parallel_layers.comm.all_gather": "input dim= groups= output= pin_layout=",
    "parallel_layers.comm.all_reduce": "op_type tensor_bucket groups pin_layout=",
    "pipeline.comm.recv_from": "tensor_meta recv_prev= tracing= all_reduce_send_recv=",
    "pipeline.comm.send": "tensor send_next= all_reduce_send_recv=",
    "kernels.flash_attn.nki_flash_attn_func": (
        "q k v lnc= dropout_p= softmax_scale= causal= mixed_precision= seed= hardware_type= transpose_nki_inputs="
    ),
    "parallel_layers.parallel_state.initialize_model_parallel": (
        "tensor_model_parallel_size= pipeline_model_parallel_size= context_parallel_size= "
        "expert_model_parallel_size= skip_collective_init= lnc_size= mesh_only="
    ),
    "parallel_layers.parallel_state.model_parallel_is_initialized": "",
    "parallel_layers.parallel_state.get_tensor_model_parallel_group": "as_list=",
    "parallel_layers.parallel_state.get_tensor_model_parallel_replica_groups": "",
    "parallel_layers.parallel_state.get_data_parallel_group": "as_list=",
    "parallel_layers.parallel_state.get_data_parallel_replica_groups": "",
    "parallel_layers.parallel_state.get_tensor_model_parallel_size": "",
    "parallel_layers.parallel_state.get_tensor_model_parallel_rank": "",
    "parallel_layers.parallel_state.get_data_parallel_size": "",
    "parallel_layers.parallel_state.get_pipeline_model_parallel_group": "as_list=",
    "parallel_layers.parallel_state.get_pipeline_model_parallel_replica_groups": "",
    "parallel_layers.parallel_state.get_pipeline_model_parallel_size": "",
    "parallel_layers.utils.requires_init_pg_override": "",
    "utils.cpu_mode": "",
}
"""Below `neuronx_distributed`: callable → its parameters in order, `=` after those with a default (without `self`)."""

REQUIRED_ARGUMENTS: Mapping[str, frozenset[str]] = {
    "modules.qkv_linear.GQAQKVColumnParallelLinear": frozenset(
        (
            "bias",
            "device",
            "dtype",
            "fuse_qkv",
            "gather_output",
            "kv_size_multiplier",
            "reduce_dtype",
            "sequence_parallel_enabled",
        )
    ),
    "parallel_layers.comm.all_gather": frozenset(
        (
            "dim",
            "groups",
            "pin_layout",
        )
    ),
    "parallel_layers.comm.all_reduce": frozenset(
        (
            "groups",
            "pin_layout",
        )
    ),
    "parallel_layers.comm.reduce_scatter": frozenset(
        (
            "groups",
            "output",
            "pin_layout",
            "scale",
            "scatter_dim",
            "shard_count",
        )
    ),
    "parallel_layers.layers.ColumnParallelLinear": frozenset(
        (
            "bias",
            "device",
            "dtype",
            "gather_output",
            "reduce_dtype",
            "sequence_dimension",
            "sequence_parallel_enabled",
            "stride",
        )
    ),
    "parallel_layers.layers.ParallelEmbedding": frozenset(
        (
            "device",
            "dtype",
            "sequence_parallel_enabled",
            "shard_across_embedding",
        )
    ),
    "parallel_layers.layers.RowParallelLinear": frozenset(
        (
            "bias",
            "device",
            "dtype",
            "input_is_parallel",
            "reduce_dtype",
            "sequence_dimension",
            "sequence_parallel_enabled",
        )
    ),
    "parallel_layers.parallel_state.initialize_model_parallel": frozenset(
        (
            "pipeline_model_parallel_size",
            "tensor_model_parallel_size",
        )
    ),
    "pipeline.comm.recv_from": frozenset(("recv_prev",)),
    "pipeline.comm.send": frozenset(("send_next",)),
}
"""Keyword arguments in use; without flash attention, whose module requires the kernel packages."""


def check_nxd_signatures() -> None:
    """Raise unless the installed neuronx-distributed accepts the keyword arguments in use.

    Raises:
        NotInstalledError: it lacks a callable or a parameter.
    """
    for name, needed in REQUIRED_ARGUMENTS.items():
        module, _, attribute = f"neuronx_distributed.{name}".rpartition(".")
        found = getattr(importlib.import_module(module), attribute, None)
        has = frozenset(inspect.signature(found).parameters) if callable(found) else frozenset[str]()
        lacking = ", ".join(sorted(needed - has))
        if lacking:
            raise NotInstalledError(
                f"the installed neuronx-distributed does not match {NXD_VERSION}: {module}.{attribute} has no "
                f"{lacking}; install the versions of constraints/"
            )
