"""What NxD's source needs in order to be imported and to run on a CPU: inert stand-ins, and collectives over gloo.

NxD imports packages of the Neuron SDK (runtime, compiler, kernels) that are not on the public index. None of them takes
part in what its parallel layers compute on a CPU, so any name of theirs is answered with an object that does nothing.
Two things are real: the platform is called trn1, and collectives that NxD asks of torch-xla directly, which does
nothing for tensors on a CPU, go over gloo.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

import torch
import torch.distributed as dist

PACKAGES = ("torch_neuronx", "libneuronxla", "neuronxcc", "nki", "nkilib")


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
    from torch_xla.core import xla_model as xm

    sys.meta_path.insert(0, Finder())
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
            dist.all_reduce(tensor, op=operations[reduce_type], group=group_of(groups))
            if scale != 1.0:
                tensor.mul_(scale)
        return inputs

    xm.all_reduce = all_reduce
    xm.rendezvous = lambda *args, **kwargs: dist.barrier()
    xm.xla_device = lambda *args, **kwargs: torch.device("cpu")
