"""Our calls of NxD against its signatures, and the signatures against its source where that is at hand."""

import ast
import os
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import lt_trainer_neuron
from lt_trainer_neuron.nxd.collectives import NxdPipelineP2P

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
    "parallel_layers.mappings.copy_to_tensor_model_parallel_region": "input_ process_group=",
    "parallel_layers.mappings.reduce_from_tensor_model_parallel_region": "input_ process_group=",
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

FILES = sorted((Path(lt_trainer_neuron.__file__).parent / "nxd").glob("*.py"))
BY_NAME = {name.rpartition(".")[2]: name for name in SIGNATURES}
SOURCE = Path(os.environ.get("LT_NXD_SOURCE", ""), "neuronx_distributed")


def imported(tree: ast.Module) -> Iterator[str]:
    """Names below neuronx_distributed that a file imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("neuronx_distributed"):
            folder = (node.module or "").partition(".")[2]
            yield from (f"{folder}.{alias.name}" for alias in node.names)


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Calls of NxD's functions and classes in files that import it."""
    for file in FILES:
        tree = ast.parse(file.read_text())
        if not list(imported(tree)):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if called in BY_NAME:
                    yield BY_NAME[called], node


def test_every_call_fits_its_signature() -> None:
    seen: set[str] = set()
    for name, call in calls():
        seen.add(name)
        parameters = SIGNATURES[name].split()
        names = [parameter.rstrip("=") for parameter in parameters]
        given = [keyword.arg for keyword in call.keywords]
        assert None not in given, f"{name} is given ** arguments"
        assert len(call.args) <= len(names), name
        taken = names[: len(call.args)] + [str(keyword) for keyword in given]
        assert len(set(taken)) == len(taken), (name, taken)
        assert set(taken) <= set(names), (name, set(taken) - set(names))
        required = {parameter for parameter in parameters if not parameter.endswith("=")}
        assert required <= set(taken), (name, required - set(taken))
    assert seen == set(SIGNATURES)


def test_nothing_of_nxd_is_imported_that_is_not_in_the_table() -> None:
    modules = {name.rpartition(".")[0] for name in SIGNATURES}
    found = {name for file in FILES for name in imported(ast.parse(file.read_text()))}
    assert found
    assert found <= modules | set(SIGNATURES)


def test_layers_that_sum_are_told_how() -> None:
    for name, call in calls():
        if "reduce_dtype=" in SIGNATURES[name]:
            assert "reduce_dtype" in {keyword.arg for keyword in call.keywords}, name


def test_only_this_folder_imports_neuron_packages() -> None:
    root = FILES[0].parent.parent
    for file in root.rglob("*.py"):
        if file.parent == FILES[0].parent:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            heavy = [name for name in names if name.partition(".")[0] in ("torch_xla", "neuronx_distributed")]
            assert not heavy, (file, heavy)


def test_outputs_go_to_the_next_stage_and_gradients_to_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []

    def send(tensor: torch.Tensor, *, send_next: bool) -> torch.Tensor:
        said.append(("send", send_next, tensor.requires_grad, tensor.is_contiguous()))
        return tensor

    def recv_from(meta: Any, *, recv_prev: bool) -> torch.Tensor:
        said.append(("recv_from", recv_prev, meta.requires_grad))
        return torch.zeros(meta.shape, dtype=meta.dtype)

    comm = types.ModuleType("neuronx_distributed.pipeline.comm")
    vars(comm).update(send=send, recv_from=recv_from)
    pipeline = types.ModuleType("neuronx_distributed.pipeline")
    vars(pipeline).update(comm=comm)
    for module in (types.ModuleType("neuronx_distributed"), pipeline, comm):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    p2p = NxdPipelineP2P()
    for way in ("forward", "backward"):
        p2p.send(torch.zeros(2, 3, requires_grad=True).T, way)
        taken = p2p.recv((4, 1, 3), torch.bfloat16, way)
        assert (taken.shape, taken.dtype) == ((4, 1, 3), torch.bfloat16)
    assert said == [
        ("send", True, False, True),
        ("recv_from", True, False),
        ("send", False, False, True),
        ("recv_from", False, False),
    ]


@pytest.mark.skipif(not SOURCE.is_dir(), reason="LT_NXD_SOURCE does not name a folder with the source of NxD")
def test_the_table_is_what_the_source_says() -> None:
    assert f'"{NXD_VERSION}' in (SOURCE / "_version.py").read_text()
    for name, wanted in SIGNATURES.items():
        module, _, attribute = name.rpartition(".")
        file = SOURCE / f"{module.replace('.', '/')}.py"
        tree = ast.parse((file if file.is_file() else SOURCE / module.replace(".", "/") / "__init__.py").read_text())
        (node,) = (node for node in tree.body if getattr(node, "name", "") == attribute)
        if isinstance(node, ast.ClassDef):
            (node,) = (method for method in node.body if getattr(method, "name", "") == "__init__")
        assert isinstance(node, ast.FunctionDef)
        arguments = node.args
        without_default = len(arguments.args) - len(arguments.defaults)
        found = [one.arg + ("=" if index >= without_default else "") for index, one in enumerate(arguments.args)]
        assert [one for one in found if one != "self"] == wanted.split(), name
