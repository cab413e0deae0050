"""Node monitor: a thread that samples CPU, memory, disk and GPUs into `<run>/monitor/`.

`host` reads the system (psutil), `nvml` the GPUs, `energy` integrates energy, `node` has the sampling thread.
"""
