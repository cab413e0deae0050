"""One rank of torchtitan on the null CUDA device: its own Trainer on random rows, with marks around the steps.

    torchrun titan_worker.py '{"out": FOLDER}'     # other fields: `JOB`

launches.py starts it in torchtitan's environment.
"""

import ctypes
import json
import os
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torchtitan import trainer  # pyright: ignore[reportMissingImports]
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss  # pyright: ignore[reportMissingImports]
from torchtitan.components.optimizer import default_adamw  # pyright: ignore[reportMissingImports]
from torchtitan.models.common.attention import ScaledDotProductAttention  # pyright: ignore[reportMissingImports]

JOB = SimpleNamespace(
    **{"family": "llama3", "flavor": "1B", "n_layers": 4, "seq_len": 2048, "documents": False, "whole_loss": False},
    **{"micro_batches": 1, "steps": 4, "tp": 1, "ep": 1, "compile": False, "cuda_graphs": False},
)
vars(JOB).update(json.loads(sys.argv[1]))
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
SPEC = import_module(f"torchtitan.models.{JOB.family}").model_registry(JOB.flavor)
os.environ["NULLCUDA_LOG"] = f"{JOB.out}/{RANK}.log"
FOUND = {"peak_bytes": [], "seconds": []}


def batches() -> Iterator[Any]:
    """Yield rows of random ids, one in a micro-batch; with documents two in each row."""
    positions = torch.arange(JOB.seq_len) % (JOB.seq_len // 2 if JOB.documents else JOB.seq_len)
    for number in range(JOB.steps * JOB.micro_batches):
        rng = np.random.default_rng((number, RANK // JOB.tp))
        ids, labels = torch.from_numpy(rng.integers(0, SPEC.model.vocab_size, (2, 1, JOB.seq_len)))
        yield {"input": ids, "positions": positions[None]}, labels


class MarkedTrainer(trainer.Trainer):
    """Trainer whose steps are marked in the device's log."""

    def train_step(self, rows: Any) -> None:
        """Train one step."""
        torch.cuda.reset_peak_memory_stats()
        mark = ctypes.CDLL(None).nullcuda_mark
        mark(f"step {self.step - 1}".encode())
        start = time.perf_counter()
        super().train_step(rows)
        FOUND["seconds"].append(time.perf_counter() - start)
        mark(b"between")
        FOUND["peak_bytes"].append(torch.cuda.max_memory_allocated())


SPEC.model.layers = SPEC.model.layers[: JOB.n_layers]
if not JOB.documents:
    ScaledDotProductAttention.sdpa_backends = [torch.nn.attention.SDPBackend.FLASH_ATTENTION]  # cuDNN cannot run here
    for layer in SPEC.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
cross_entropy = CrossEntropyLoss.Config(global_vocab_size=SPEC.model.vocab_size)
config = trainer.Trainer.Config(
    model_spec=SPEC,
    loss=cross_entropy if JOB.whole_loss else ChunkedLossWrapper.Config(loss_fn=cross_entropy),
    optimizer=default_adamw(lr=1e-3),
    dataloader=SimpleNamespace(build=lambda **_: batches()),
    tokenizer=SimpleNamespace(build=lambda **_: None),
    dump_folder=JOB.out,
    activation_checkpoint=None,
)
training, every = config.training, JOB.micro_batches * WORLD_SIZE // JOB.tp
training.local_batch_size, training.global_batch_size, training.seq_len = 1, every, JOB.seq_len
training.steps, training.disable_cuda_graphs, config.metrics.log_freq = JOB.steps, not JOB.cuda_graphs, JOB.steps
config.lr_scheduler.warmup_steps, config.parallelism.tensor_parallel_degree = 1, JOB.tp
config.compile.enable, config.checkpoint.enable, config.validator.enable = JOB.compile, False, False
config.parallelism.expert_parallel_degree = JOB.ep
if __name__ == "__main__":  # else by a test, which trains on a CPU
    MarkedTrainer(config).train()
    Path(JOB.out, f"{RANK}.json").write_text(json.dumps(FOUND))
    os._exit(0)
