"""Training on one CPU thread in the shape of litespark-default: lt beside litgpt and transformers, both compiled.

    uv run python tools/bench/train.py                  # the tables of docs/benchmarks/training.md

12 x 768, feed-forward 2072, vocabulary 32000, 134.8 M parameters; rows of 1024 and of 512 tokens, one per step;
bfloat16 compute with fp32 weights, AdamW, gradients clipped to a norm of 1. Peers run under torch's autocast, as in
their own trainers, compiled by torch.compile and with torch's fused AdamW, which is faster on a CPU than the ones they
choose there; ours is the engine of `lt train run`, eager as it is by default on a CPU, and compiled. All start from the
same weights. Each trainer is a process of its own. They alternate step by step, each waiting while another runs, so
that other load on the machine affects all alike; CPU seconds are those of the process; medians over the steps, without
compilation and warm-up.

Rows are from a text-like source, a fixed order-1 Markov chain, the same for all.

litgpt needs lightning and other packages: they are installed into a temporary environment, which uses torch and
transformers of the running one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from results import describe_machine

ROOT = Path(__file__).parents[2]
PRESET, VOCAB, SEQ_LENS, SEED = "litespark-default", 32000, (1024, 512), 0
LR, BETAS, WEIGHT_DECAY, GRAD_CLIP = 4e-4, (0.9, 0.95), 0.01, 1.0
WARMUP_STEPS = 20
"""Steps until the full learning rate is reached."""
TRAINERS = ("lt", "lt-compiled", "litgpt", "transformers")
LABELS = {
    "lt": "lt",
    "lt-compiled": "lt + compile",
    "litgpt": "litgpt + compile",
    "transformers": "transformers + compile",
}
TITAN_REQUIREMENTS = "torchtitan==0.3.0 spmd_types==0.2.3 tyro docstring_parser typeguard torchdata torch_checkpointing"
PEER_REQUIREMENTS = "litgpt==0.5.13 lightning==2.6.6 lightning-utilities torchmetrics jsonargparse"


# --- A trainer, in a process of its own -----------------------------------------------------------------------------


def make_row(step: int, seq_len: int) -> np.ndarray:
    """Return the row of a step, [seq_len + 1]: a Markov chain with eight possible successors of each id."""
    rng = np.random.default_rng([7, step])
    choices, found = rng.integers(0, 8, seq_len + 1), np.empty(seq_len + 1, np.int64)
    found[0] = rng.integers(0, 512)
    for i in range(1, seq_len + 1):
        found[i] = (found[i - 1] * 31 + choices[i] * 97) % 512
    return found


def learning_rate(step: int) -> float:
    """Return the learning rate of a step: `LR` after `WARMUP_STEPS` steps."""
    return LR * min(1.0, (step + 1) / WARMUP_STEPS)


def make_lt_step(
    seq_len: int, *, compiled: bool, preset: str = PRESET, vocab: int = VOCAB, dtype: str = "bfloat16"
) -> Any:
    """Return the step function of our engine."""
    from lt_trainer.config.recipe import load, model_config
    from lt_trainer.engine import World

    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "helpers"))
    from lt_test_helpers.layouts import step_batch
    from lt_trainer_gpu.spec import SPEC

    base = {
        "run": {"seed": SEED},
        "model": {"preset": preset, "vocab_size": vocab},
        "data": {"synthetic": True, "seq_len": seq_len, "document_mask": False},
        "batch": {"global_batch_size": 1, "micro_batch_size": 1},
        "optimizer": {"beta1": BETAS[0], "beta2": BETAS[1], "weight_decay": WEIGHT_DECAY, "grad_clip": GRAD_CLIP},
        "engine": {"gpu": {"device": "cpu", "dtype": dtype, "compile": compiled}},
    }
    recipe = load(base=base).recipe
    engine = SPEC.open(recipe, model_config(recipe, vocab), World())
    positions = np.arange(seq_len, dtype=np.int32).reshape(1, 1, seq_len)

    def step(row: np.ndarray, lr: float) -> float:
        ids = row.astype(np.int32).reshape(1, 1, -1)
        batch = step_batch(
            input_ids=np.ascontiguousarray(ids[..., :-1]),
            labels=np.ascontiguousarray(ids[..., 1:]),
            position_ids=positions,
            doc_ids=np.zeros_like(positions),
            valid_tokens=seq_len,
        )
        return engine.fetch_metrics([engine.step(batch, lr)])[0].loss

    return step


def make_peer_step(model: Any, loss_of: Any, *, autocast: bool = True, groups: Any = None) -> Any:
    """Return a step function as in the peers' own loops: autocast, clip, fused AdamW of all parameters or of groups."""
    import torch

    groups = groups or model.parameters()
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)

    def step(row: np.ndarray, lr: float) -> float:
        ids = torch.from_numpy(np.atleast_2d(row))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = loss_of(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def make_litgpt_step(seq_len: int, config: Any = None, matrix_decay: float | None = None) -> Any:
    """Return the step function of litgpt: its model and loss, compiled as in its pretrain command.

    Args:
        seq_len: length of rows.
        config: lt's ModelConfig of a Llama; by default that of the preset.
        matrix_decay: weight decay of matrices alone; by default all parameters decay, as in litgpt.
    """
    import torch
    from litgpt.model import GPT, Config  # pyright: ignore[reportMissingImports] - in an environment of its own
    from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama  # pyright: ignore[reportMissingImports]
    from litgpt.utils import chunked_cross_entropy  # pyright: ignore[reportMissingImports]

    shape = config or preset_config()
    config = Config(
        name="llama",
        block_size=seq_len,
        vocab_size=shape.vocab_size,
        padded_vocab_size=shape.vocab_size,
        n_layer=shape.n_layers,
        n_head=shape.n_heads,
        n_embd=shape.hidden_size,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        intermediate_size=shape.intermediate_size,
    )
    model, weights = GPT(config), {}
    copy_weights_hf_llama(config, {}, weights, initial_weights(shape))
    model.load_state_dict(weights)
    compiled = torch.compile(model)
    groups = None
    if matrix_decay is not None:
        parts: dict[bool, list[Any]] = {True: [], False: []}
        for name, parameter in model.named_parameters():
            parts[parameter.ndim > 1 and "wte" not in name].append(parameter)
        groups = [{"params": part, "weight_decay": matrix_decay * decays} for decays, part in parts.items()]
    return make_peer_step(model, lambda ids, labels: chunked_cross_entropy(compiled(ids), labels), groups=groups)


def make_transformers_step(seq_len: int) -> Any:
    """Return the step function of transformers, compiled."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=768,
        intermediate_size=2072,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=12,
        max_position_embeddings=seq_len,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).train()
    model.load_state_dict(initial_weights(preset_config()))
    loss = torch.nn.functional.cross_entropy

    @torch.compile
    def loss_of(ids: Any, labels: Any) -> Any:
        logits = model(input_ids=ids, use_cache=False).logits
        return loss(logits.float().flatten(0, 1), labels.flatten())

    return make_peer_step(model, loss_of)


def preset_config() -> Any:
    """Return the shape of the models."""
    from lt_model import PRESETS

    return dataclasses.replace(PRESETS[PRESET], vocab_size=VOCAB)


def initial_weights(config: Any) -> dict[str, Any]:
    """Return our engine's initial weights, float32, by the names of transformers."""
    from lt_model import param_specs
    from lt_model.init import init_slice

    return {parameter.name: init_slice(parameter, SEED) for parameter in param_specs(config)}


def read_status_bytes(field: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    (line,) = (line for line in lines if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


MAKERS = {
    "lt": partial(make_lt_step, compiled=False),
    "lt-compiled": partial(make_lt_step, compiled=True),
    "litgpt": make_litgpt_step,
    "transformers": make_transformers_step,
}
"""Trainer → its step function for a length of rows: row and learning rate in, loss out."""


def run_child(name: str, seq_len: int) -> None:
    """Run one trainer: a step for each number on stdin, a JSON line for each on stdout."""
    import torch

    torch.set_num_threads(1)
    step = MAKERS[name](seq_len)
    print(json.dumps({"ready": name}), flush=True)
    for line in sys.stdin:
        index = int(line)
        row = make_row(index, seq_len)
        start, start_wall = time.process_time(), time.perf_counter()
        loss = step(row, learning_rate(index))
        seconds, wall = time.process_time() - start, time.perf_counter() - start_wall
        result = {"cpu_s": seconds, "wall_s": wall, "loss": loss, "peak_rss": read_status_bytes("VmHWM")}
        print(json.dumps(result), flush=True)


# --- The comparison -------------------------------------------------------------------------------------------------


def create_environment(folder: Path, requirements: str = PEER_REQUIREMENTS) -> str:
    """Create an environment with the peers' packages and with torch and the rest of this one; return its python."""
    subprocess.run(["uv", "venv", "-q", "--python", sys.executable, str(folder)], check=True)
    python, own = folder / "bin" / "python", sysconfig.get_path("purelib")
    command = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site_packages = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    Path(site_packages, "parent.pth").write_text(f"import site; site.addsitedir({own!r})\n", encoding="utf-8")
    # --no-deps: their pins conflict with each other, and torch is large
    command = ["uv", "pip", "install", "-q", "--no-deps", "--python", str(python)]
    subprocess.run(command + requirements.split(), check=True)
    return str(python)


class Trainer:
    """Trainer's process on rows of `seq_len`."""

    def __init__(self, name: str, python: str, *, seq_len: int) -> None:
        self.name = name
        self.steps: list[dict[str, float]] = []
        env = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        command = [python, "-W", "ignore", __file__, "--child", name, "--seq-len", str(seq_len)]
        self._process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._read() == {"ready": name}

    def step(self, index: int) -> None:
        """Run a step and record its cost."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{index}\n")
        self._process.stdin.flush()
        self.steps.append(self._read())

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with code {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def compare_trainers(names: list[str], seq_len: int, steps: int, warmup: int, python: str) -> dict[str, Any]:
    """Run the trainers alternating."""
    trainers = [Trainer(name, python if name == "litgpt" else sys.executable, seq_len=seq_len) for name in names]
    try:
        for index in range(warmup + steps):
            for trainer in trainers if index % 2 else reversed(trainers):
                trainer.step(index)
    finally:
        for trainer in trainers:
            trainer.close()
    return {trainer.name: summarize(trainer.steps, seq_len, warmup) for trainer in trainers}


def summarize(steps: list[dict[str, float]], seq_len: int, warmup: int) -> dict[str, Any]:
    """Summarize one trainer's steps."""
    timed = [step["cpu_s"] for step in steps[warmup:]]
    tail = [step["loss"] for step in steps[-max(1, len(steps) // 10) :]]
    return {
        "cpu_s": statistics.median(timed),
        "cpu_s_all": [round(seconds, 3) for seconds in timed],
        "tokens_per_cpu_s": seq_len / statistics.median(timed),
        "first_step_cpu_s": steps[0]["cpu_s"],
        "first_step_wall_s": steps[0]["wall_s"],
        "peak_rss_bytes": steps[-1]["peak_rss"],
        "loss_first": steps[0]["loss"],
        "loss_last_tenth": statistics.mean(tail),
        "steps": len(steps),
    }


def render_table(trainers: dict[str, Any]) -> list[str]:
    """Return the table of rows of one length."""
    lines = [
        "| trainer | CPU s per step | peak resident | first step, CPU s | loss, first, last tenth |",
        "|---|---|---|---|---|",
    ]
    for name, row in trainers.items():
        lines.append(
            f"| {LABELS[name]} | {row['cpu_s']:.2f} | "
            f"{row['peak_rss_bytes'] / 2**30:.2f} GiB | {row['first_step_cpu_s']:.1f} | "
            f"{row['loss_first']:.3f}, {row['loss_last_tenth']:.3f} |"
        )
    return lines


def main() -> int:
    """Measure, and print the tables of docs/benchmarks/training.md with their numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each trainer and length")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--only", default=",".join(TRAINERS), help="trainers, separated by commas")
    parser.add_argument("--python", help="interpreter with litgpt installed")
    parser.add_argument("--seq-len", type=int, action="append", help=f"length of rows; default {SEQ_LENS}")
    parser.add_argument("--child", choices=TRAINERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    seq_lens = options.seq_len or SEQ_LENS
    if options.child:
        run_child(options.child, seq_lens[0])
        return 0
    names = options.only.split(",")
    print(describe_machine("torch", "transformers"), PEER_REQUIREMENTS.split()[0])
    with tempfile.TemporaryDirectory(prefix="lt-bench-env-") as folder:
        python = options.python or (create_environment(Path(folder) / "env") if "litgpt" in names else "")
        for seq_len in seq_lens:
            found = compare_trainers(names, seq_len, options.steps, options.warmup, python)
            print(f"## Rows of {seq_len} tokens", *render_table(found), json.dumps(found), sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
