"""One rank of torchtitan's own Trainer on the CPU, in float32, from given weights; what rank 0 logs is in found.json.

    torchrun titan_on_cpu.py '{"out": FOLDER, "weights": FILE}'     # other fields: tools/bench/titan_worker.py

The rows and labels are those of `make_rows`.
"""

import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._utils as torch_utils
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[4] / "tools/bench"))
from train import make_row

IGNORED = -100


def make_rows(numbers: range, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and labels [numbers, T] of rows by number, int64; some first labels are -100, in each row others."""
    rows = np.stack([make_row(number, seq_len) for number in numbers])
    labels = rows[:, 1:].copy()
    for number, own in zip(numbers, labels, strict=True):
        own[: number * 37 % seq_len] = IGNORED
    return rows[:, :-1], labels


def use_cpu() -> None:
    """Give torchtitan a device: it takes the accelerator's module, else torch.cuda. Call before its import."""
    cpu: Any = types.ModuleType("cpu")
    vars(cpu).update({name: getattr(torch.cpu, name) for name in dir(torch.cpu) if not name.startswith("_")})
    found = {"current_device": 0, "device_count": 1, "get_device_name": "CPU", "memory_stats": {}}
    found["get_device_properties"] = types.SimpleNamespace(total_memory=1 << 34)
    for name in ("set_device", "synchronize", "reset_peak_memory_stats", "empty_cache", "manual_seed_all", *found):
        setattr(cpu, name, lambda *_, name=name: found.get(name))
    barrier, module_of = dist.barrier, torch_utils._get_device_module
    torch_utils._get_available_device_type = lambda: "cpu"
    torch_utils._get_device_module = lambda kind: cpu if kind == "cpu" else module_of(kind)
    dist.barrier = lambda *args, device_ids=None, **options: barrier(*args, **options)


def main() -> None:
    """Train as the job says."""
    use_cpu()
    import titan_worker as worker
    from safetensors.torch import load_file
    from torch.distributed.tensor import distribute_tensor
    from torchtitan.components.optimizer import default_adamw  # pyright: ignore[reportMissingImports]
    from torchtitan.trainer import Trainer  # pyright: ignore[reportMissingImports]

    job, spec, config = worker.JOB, worker.SPEC, worker.config
    data_ranks, lrs, losses, norms = worker.WORLD_SIZE, [], [], []

    def batches() -> Any:
        positions = torch.arange(job.seq_len)[None]
        for number in range(worker.RANK, job.steps * job.micro_batches * data_ranks, data_ranks):
            ids, labels = map(torch.from_numpy, make_rows(range(number, number + 1), job.seq_len))
            yield {"input": ids, "positions": positions}, labels

    for layer in spec.model.layers:
        if getattr(layer, "moe", None):
            layer.moe.load_balance_coeff = None  # no expert is helped
    backends = torch.nn.attention.SDPBackend
    worker.ScaledDotProductAttention.sdpa_backends = [backends.FLASH_ATTENTION, backends.MATH]
    undecayed = default_adamw(lr=1e-3, weight_decay=0.0).param_groups[0]
    undecayed.pattern = r".*(norm|tok_embeddings).*"  # as here
    config.optimizer.param_groups.insert(0, undecayed)
    config.training.mixed_precision_param, config.metrics.log_freq = "float32", 1
    config.dataloader = types.SimpleNamespace(build=lambda **_: batches())
    trainer = Trainer(config)
    whole = spec.model.build()  # a sharded one does not take queries, keys and values apart
    whole.load_state_dict(spec.state_dict_adapter(spec.model, None).from_hf(load_file(job.weights)))
    for parameter, value in zip(trainer.model_parts[0].parameters(), whole.parameters(), strict=True):
        parameter.data.copy_(distribute_tensor(value.data, parameter.device_mesh, parameter.placements))
    for module in trainer.model_parts[0].modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no product before a sum

    def log(_step: int, loss: float, _most: float, norm: float, extra_metrics: Any) -> None:
        lrs.append(next(value for name, value in extra_metrics.items() if "lr" in name))
        losses.append(loss)
        norms.append(norm)

    trainer.metrics_processor.log = log
    trainer.train()
    if worker.RANK == 0:
        Path(job.out, "found.json").write_text(json.dumps({"lrs": lrs, "losses": losses, "norms": norms}))


if __name__ == "__main__":
    main()
