"""Which NeuronCores a process gets: a stand-in for what torch-xla and the Neuron runtime do with its environment.

torch-xla 2.9 (`torch_xla._internal.neuron.configure_pjrt_environment`, called by `import torch_xla` where libneuronxla
is installed) gives a process the core of its local rank, and tells PJRT of the other ranks, only where
TORCHELASTIC_RUN_ID is set (`torch.distributed.is_torchelastic_launched`). The runtime reserves the cores of
NEURON_RT_VISIBLE_CORES, which comes before NEURON_RT_NUM_CORES, and without both all; a core has one process at a time.
"""

from collections.abc import Mapping, MutableMapping
from pathlib import Path

ALL_CORES = 32


def parse_cores(text: str) -> list[int]:
    """Return the cores of NEURON_RT_VISIBLE_CORES: numbers and ranges, such as 0,4-7."""
    bounds = [[int(bound) for bound in part.split("-")] for part in text.split(",")]
    return [core for first, *last in bounds for core in range(first, (last or [first])[0] + 1)]


def configure(environ: MutableMapping[str, str]) -> None:
    """Set what `import torch_xla` sets."""
    environ.setdefault("NEURON_RT_ROOT_COMM_ID", f"{environ.get('MASTER_ADDR', 'localhost')}:62182")
    if "TORCHELASTIC_RUN_ID" not in environ:
        return
    rank, size = int(environ.get("LOCAL_RANK", "0")), int(environ.get("LOCAL_WORLD_SIZE", "1"))
    if not {"NEURON_PJRT_PROCESSES_NUM_DEVICES", "NEURON_PJRT_WORLD_SIZE"} & environ.keys():
        environ["NEURON_PJRT_WORLD_SIZE"] = environ.get("WORLD_SIZE", "1")
        environ["PJRT_LOCAL_PROCESS_COUNT"] = str(size)
    if not environ.get("NEURON_RT_VISIBLE_CORES"):
        environ["NEURON_RT_VISIBLE_CORES"] = str(rank)
    else:
        cores = parse_cores(environ["NEURON_RT_VISIBLE_CORES"])
        if not (len(cores) <= 1 and size == 1):
            if len(cores) != size:
                raise ValueError(f"LOCAL_WORLD_SIZE is {size}, and the cores are {cores}")
            environ["NEURON_RT_VISIBLE_CORES"] = str(cores[rank])
    environ["NEURON_PJRT_PROCESS_INDEX"] = environ.get("RANK", "0")
    environ["PJRT_LOCAL_PROCESS_RANK"] = str(rank)


def reserve_cores(environ: Mapping[str, str], node: Path) -> None:
    """Reserve this process's cores: a file for each, in a folder for the node."""
    visible = environ.get("NEURON_RT_VISIBLE_CORES")
    for core in parse_cores(visible) if visible else range(int(environ.get("NEURON_RT_NUM_CORES", "0")) or ALL_CORES):
        with open(node / f"core-{core}", "x", encoding="ascii") as file:  # fails where another process has it
            file.write(f"{environ['NEURON_PJRT_PROCESS_INDEX']} of {environ['NEURON_PJRT_WORLD_SIZE']}")
