"""Node monitor: a thread that samples CPU, memory, disk and GPUs into `<run>/monitor/`.

`host` reads the system (psutil), `nvml` the GPUs, `energy` integrates energy, `node` has the sampling thread.
"""

from typing import TYPE_CHECKING

from lt_trainer.lazy import lazy_exports

if TYPE_CHECKING:
    from lt_trainer.observability.monitor.host import HostSampler as HostSampler
    from lt_trainer.observability.monitor.node import NodeMonitor as NodeMonitor
    from lt_trainer.observability.monitor.node import node_paths as node_paths
    from lt_trainer.observability.monitor.nvml import GpuSampler as GpuSampler
    from lt_trainer.observability.monitor.nvml import GpusUnavailableError as GpusUnavailableError
    from lt_trainer.observability.monitor.nvml import load_nvml as load_nvml
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "host": "HostSampler",
            "node": "NodeMonitor node_paths",
            "nvml": "GpuSampler GpusUnavailableError load_nvml",
        },
    )
