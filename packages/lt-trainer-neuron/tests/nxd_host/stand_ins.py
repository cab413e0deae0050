"""What NxD's source needs in order to be imported and to run on a CPU: inert stand-ins, and collectives over gloo.

NxD imports packages of the Neuron SDK (runtime, compiler, kernels) that are not on the public index, and tenacity, for
requests to S3. None of them takes part in what its parallel layers compute on a CPU, so any name of theirs is answered
with an object that does nothing. transformers is hidden: NxD does without it, and not with its version 5.
Three things are real: the platform is called trn1; collectives that NxD asks of torch-xla directly, which does nothing
for tensors on a CPU, go over gloo; and gradients reach NxD's linear layers dense, for these take views of them, which
torch-xla's tensors, always dense, allow and a CPU's transposed ones do not.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import types
from typing import Any

import torch
import torch.distributed as dist

PACKAGES = ("torch_neuronx", "libneuronxla", "neuronxcc", "nki", "nkilib", "tenacity")


class Inert:
    """Takes every call and has every name."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else Inert()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Inert()

    def __getitem__(self, key: Any) -> Any:
        return Inert()

    def __mro_entries__(self, bases: Any) -> Any:
        return ()


class InertModule(types.ModuleType):
    """A module of a package that is not there."""

    __path__ = ()
    __version__ = "2.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Inert()


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds any module below `PACKAGES`."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname.partition(".")[0] not in PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        module = InertModule(spec.name)
        if spec.name == "torch_neuronx.utils":
            vars(module)["get_platform_target"] = lambda: "trn1"
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install() -> None:
    """Put the stand-ins in place; before NxD is imported."""
    from torch_xla.core import xla_env_vars
    from torch_xla.core import xla_model as xm

    sys.meta_path.insert(0, Finder())
    vars(sys)["modules"]["transformers"] = None  # an import of it fails as if it were not installed
    torch.classes.__dict__.setdefault("neuron", Inert())
    groups: dict[str, Any] = {}

    def group_of(lists: Any) -> Any:
        if not isinstance(lists, list):
            return lists
        key = str(lists)
        if key not in groups:
            for ranks in lists:
                made = dist.new_group([int(rank) for rank in ranks], backend="gloo")
                if dist.get_rank() in ranks:
                    groups[key] = made
        return groups[key]

    operations = {xm.REDUCE_SUM: dist.ReduceOp.SUM, xm.REDUCE_MAX: dist.ReduceOp.MAX}

    def all_reduce(reduce_type: str, inputs: Any, scale: float = 1.0, groups: Any = None, **_: Any) -> Any:
        for tensor in inputs if isinstance(inputs, list) else [inputs]:
            dense = tensor.contiguous()  # gloo takes no others
            dist.all_reduce(dense, op=operations[reduce_type], group=group_of(groups))
            tensor.copy_(dense * scale)
        return inputs

    def all_gather(value: Any, dim: int = 0, groups: Any = None, **_: Any) -> Any:
        group = group_of(groups)
        parts = [torch.empty_like(value.contiguous()) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, value.contiguous(), group=group)
        return torch.cat(parts, dim=dim)

    def reduce_scatter(reduce_type: str, value: Any, *, output: Any, groups: Any, scatter_dim: int, **_: Any) -> Any:
        group = group_of(groups)
        whole = value.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(whole, op=operations[reduce_type], group=group)
        output.copy_(whole.chunk(dist.get_world_size(group), dim=scatter_dim)[dist.get_rank(group)])
        return output

    xm.all_reduce, xm.all_gather, xm.reduce_scatter = all_reduce, all_gather, reduce_scatter
    xm.rendezvous = lambda *args, **kwargs: dist.barrier()
    xm.xla_device = lambda *args, **kwargs: torch.device("cpu")
    xla_env_vars.HOST_WORLD_SIZE = "HOST_WORLD_SIZE"  # NxD asks for the name; newer releases of torch-xla lack it
    os.environ["HOST_WORLD_SIZE"] = "1"
    _dense_gradients()


def _dense_gradients() -> None:
    from neuronx_distributed.modules import qkv_linear
    from neuronx_distributed.parallel_layers import layers

    for function in (layers.LinearWithAsyncCommunication, qkv_linear.GQAQKVLinearWithAsyncCommunication):

        def dense(ctx: Any, *gradients: Any, backward: Any = function.backward) -> Any:
            return backward(ctx, *(gradient.contiguous() for gradient in gradients))

        function.backward = staticmethod(dense)
