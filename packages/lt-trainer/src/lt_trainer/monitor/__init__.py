"""What a node does while it trains: CPU, memory, disk and GPUs, sampled by a thread into `<run>/monitor/`.

`host` reads the system (psutil), `nvml` the GPUs, `energy` adds up joules, `node` is the thread that joins them.
"""

from lt_trainer.monitor.node import NodeMonitor, files

__all__ = ["NodeMonitor", "files"]
