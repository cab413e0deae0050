"""Torch-native engine of lt: FSDP2 and tensor parallelism on CUDA and, with the same code, on CPU."""

from lt_trainer_gpu.options import GpuOptions
from lt_trainer_gpu.spec import SPEC, GpuSpec

__all__ = ["SPEC", "GpuOptions", "GpuSpec"]
