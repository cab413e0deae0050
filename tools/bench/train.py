"""One CPU thread trains the shape of litespark-default: ours beside litgpt (compiled) and transformers (eager).

    uv run python tools/bench/train.py                  # JSON on stdout
    uv run python tools/bench/train.py --write          # and docs/benchmarks/training.md with its JSON beside it

12 x 768, feed-forward 2072, vocabulary 32000, 134.8 M parameters; rows of 1024 tokens, one a step; bfloat16 compute
with fp32 weights, AdamW, gradients clipped to a norm of 1. Peers run under torch's autocast, as their own training
does, and with the AdamW that their trainers take on a CPU (transformers: fused); ours is the engine that `lt train run`
uses. All start with the same weights. Each trainer is a process of its own. They take turns, step by step, each waiting
while another runs, so that whatever else the machine does falls on all alike; CPU seconds are those of the process, and
medians over the steps count, compilation and warm-up apart.

Rows are of a text-like source, a fixed order-1 Markov chain, the same for all; whether all learn the same from them is
what `train_losses.py` shows. `--start` measures from the command to the first step of `lt train run`.

litgpt needs lightning and other packages: an environment is made for it in a temporary folder, which takes torch and
transformers from the running one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/benchmarks/training.md"
VOCAB, SEQ_LEN = 32000, 1024
LR, BETAS, DECAY, CLIP = 4e-4, (0.9, 0.95), 0.01, 1.0
WARMUP = 20
"""Steps until the learning rate is whole."""
TRAINERS = ("lt", "litgpt", "transformers")
LABELS = {"lt": "lt", "litgpt": "litgpt + compile", "transformers": "transformers, eager"}
PEERS = ("litgpt==0.5.13", "lightning==2.6.6", "lightning-utilities", "torchmetrics", "jsonargparse")
BARS = {"litgpt": 1.1, "transformers": 1.6}
MEMORY_BAR = 0.75


# --- A trainer, in a process of its own -----------------------------------------------------------------------------


def rows(step: int) -> np.ndarray:
    """The row of a step, [SEQ_LEN + 1]: a Markov chain whose next id is one of eight that the last one decides."""
    rng = np.random.default_rng([7, step])
    choices, found = rng.integers(0, 8, SEQ_LEN + 1), np.empty(SEQ_LEN + 1, np.int64)
    found[0] = rng.integers(0, 512)
    for i in range(1, SEQ_LEN + 1):
        found[i] = (found[i - 1] * 31 + choices[i] * 97) % 512
    return found


def rate(step: int) -> float:
    """The learning rate of a step: `LR` after `WARMUP` steps."""
    return LR * min(1.0, (step + 1) / WARMUP)


def ours(seed: int) -> Any:
    """A step of our engine."""
    from lt_trainer.engine import StepBatch, World
    from lt_trainer.recipe import llama_config, load
    from lt_trainer_gpu.spec import SPEC

    base = {
        "run": {"seed": seed},
        "model": {"preset": "litespark-default", "vocab_size": VOCAB},
        "data": {"synthetic": True, "seq_len": SEQ_LEN, "document_mask": False},
        "batch": {"global_batch": 1, "micro_batch": 1},
        "optimizer": {"beta1": BETAS[0], "beta2": BETAS[1], "weight_decay": DECAY, "grad_clip": CLIP},
        "engine": {"gpu": {"device": "cpu", "dtype": "bfloat16"}},
    }
    recipe = load(base=base).recipe
    engine = SPEC.open(recipe, llama_config(recipe, VOCAB), World())
    positions = np.arange(SEQ_LEN, dtype=np.int32).reshape(1, 1, SEQ_LEN)

    def step(row: np.ndarray, lr: float) -> float:
        ids = row.astype(np.int32).reshape(1, 1, -1)
        batch = StepBatch(
            input_ids=np.ascontiguousarray(ids[..., :-1]),
            labels=np.ascontiguousarray(ids[..., 1:]),
            position_ids=positions,
            doc_ids=np.zeros_like(positions),
            valid_tokens=SEQ_LEN,
        )
        return engine.read([engine.step(batch, lr)])[0].loss

    return step


def peer_step(model: Any, loss_of: Any, *, fused: bool) -> Any:
    """A step as the peers' own loops make it: autocast, clip, AdamW."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=DECAY, fused=fused)

    def step(row: np.ndarray, lr: float) -> float:
        ids = torch.from_numpy(row)[None]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def litgpt(seed: int) -> Any:
    """The model of litgpt, its loss, compiled whole as its pretrain command does."""
    import torch
    from litgpt.model import GPT, Config  # pyright: ignore[reportMissingImports] - in an environment of its own
    from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama  # pyright: ignore[reportMissingImports]
    from litgpt.utils import chunked_cross_entropy  # pyright: ignore[reportMissingImports]

    config = Config(
        name="litespark-default",
        block_size=SEQ_LEN,
        vocab_size=VOCAB,
        padded_vocab_size=VOCAB,
        n_layer=12,
        n_head=12,
        n_embd=768,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        intermediate_size=2072,
    )
    model, started = GPT(config), {}
    copy_weights_hf_llama(config, {}, started, initial_weights(seed))
    model.load_state_dict(started)
    compiled = torch.compile(model)
    return peer_step(model, lambda ids, labels: chunked_cross_entropy(compiled(ids), labels), fused=False)


def transformers(seed: int, noise: float) -> Any:
    """The model of transformers, eager; `noise` is what its initial weights are changed by, relative to each."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=768,
        intermediate_size=2072,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=12,
        max_position_embeddings=SEQ_LEN,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).train()
    model.load_state_dict(initial_weights(seed))
    if noise:
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1 + noise * torch.randn(weight.shape, generator=draw))
    loss = torch.nn.functional.cross_entropy

    def loss_of(ids: Any, labels: Any) -> Any:
        logits = model(input_ids=ids, use_cache=False).logits
        return loss(logits.float().flatten(0, 1), labels.flatten())

    return peer_step(model, loss_of, fused=True)


def initial_weights(seed: int) -> dict[str, Any]:
    """The weights that ours starts with, float32, by the names of transformers."""
    from lt_model import PRESETS, parameters
    from lt_model.init import init_slice

    config = dataclasses.replace(PRESETS["litespark-default"], vocab_size=VOCAB)
    return {parameter.name: init_slice(parameter, seed) for parameter in parameters(config)}


def resident_bytes(field: str) -> int:
    """A field of /proc/self/status."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    (line,) = (line for line in lines if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def child(name: str, seed: int, noise: float) -> None:
    """One trainer: a step for each number on stdin, a JSON line for each on stdout."""
    import torch

    torch.set_num_threads(1)
    assert not noise or name == "transformers"
    makers = {"lt": ours, "litgpt": litgpt, "transformers": lambda of: transformers(of, noise)}
    step = makers[name](seed)
    print(json.dumps({"ready": name}), flush=True)
    for line in sys.stdin:
        index = int(line)
        row = rows(index)
        began, began_wall = time.process_time(), time.perf_counter()
        loss = step(row, rate(index))
        seconds, wall = time.process_time() - began, time.perf_counter() - began_wall
        told = {"cpu_s": seconds, "wall_s": wall, "loss": loss, "peak_rss": resident_bytes("VmHWM")}
        print(json.dumps(told), flush=True)


# --- The comparison -------------------------------------------------------------------------------------------------


def environment(folder: Path) -> str:
    """An interpreter that has the peers' packages, and torch and the rest from this one."""
    subprocess.run(["uv", "venv", "-q", "--python", sys.executable, str(folder)], check=True)
    python = folder / "bin" / "python"
    own = sysconfig.get_path("purelib")
    asked = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    place = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    Path(place, "beside.pth").write_text(f"import site; site.addsitedir({own!r})\n", encoding="utf-8")
    # Without what they depend on: their pins exclude each other's, and torch is large.
    subprocess.run(["uv", "pip", "install", "-q", "--python", str(python), "--no-deps", *PEERS], check=True)
    return str(python)


class Trainer:
    """A trainer's process, its weights drawn from `seed` and changed by `noise`."""

    def __init__(self, name: str, python: str, seed: int = 0, noise: float = 0.0) -> None:
        self.name = name
        self.steps: list[dict[str, float]] = []
        env = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        child = ["--child", name, "--seed", str(seed), "--noise", str(noise)]
        command = [python, "-W", "ignore", str(Path(__file__).resolve()), *child]
        self._process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._read() == {"ready": name}

    def step(self, index: int) -> None:
        """Do a step and note what it took."""
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


def compare(names: list[str], steps: int, warmup: int, python: str) -> dict[str, Any]:
    """Let the trainers take turns."""
    trainers = [Trainer(name, python if name == "litgpt" else sys.executable) for name in names]
    try:
        for index in range(warmup + steps):
            for trainer in trainers if index % 2 else reversed(trainers):
                trainer.step(index)
    finally:
        for trainer in trainers:
            trainer.close()
    return {trainer.name: summary(trainer.steps, warmup) for trainer in trainers}


def summary(steps: list[dict[str, float]], warmup: int) -> dict[str, Any]:
    """Of one trainer's steps."""
    timed = [step["cpu_s"] for step in steps[warmup:]]
    tail = [step["loss"] for step in steps[-max(1, len(steps) // 10) :]]
    return {
        "cpu_s": statistics.median(timed),
        "cpu_s_all": [round(seconds, 3) for seconds in timed],
        "tokens_per_cpu_s": SEQ_LEN / statistics.median(timed),
        "first_step_cpu_s": steps[0]["cpu_s"],
        "first_step_wall_s": steps[0]["wall_s"],
        "peak_rss_bytes": steps[-1]["peak_rss"],
        "loss_first": steps[0]["loss"],
        "loss_last_tenth": statistics.mean(tail),
        "steps": len(steps),
    }


def start_seconds() -> dict[str, float]:
    """From the command to the end of the first step of `lt train run` on the CPU, by the clock and in CPU seconds.

    The second start is measured: the first leaves compiled modules, as an installed package's first use does.
    """
    with tempfile.TemporaryDirectory(prefix="lt-bench-pyc-") as compiled:
        env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        env |= {"OMP_NUM_THREADS": "2", "PYTHONPYCACHEPREFIX": compiled}
        return [one_start(env) for _ in range(2)][-1]


def one_start(env: dict[str, str]) -> dict[str, float]:
    """One start in this environment; `step_s` is the first step's own time."""
    import resource

    with tempfile.TemporaryDirectory(prefix="lt-bench-") as name:
        recipe = Path(name) / "run.toml"
        recipe.write_text(
            f'[run]\nout = "{name}/run"\n[model]\npreset = "litespark-default"\nvocab_size = {VOCAB}\n'
            f"[data]\nsynthetic = true\nseq_len = {SEQ_LEN}\n[batch]\nglobal_batch = 1\nmicro_batch = 1\n"
            "[schedule]\nmax_steps = 10\nwarmup_steps = 1\n[metrics]\nlog_interval = 1\n"
            '[engine.gpu]\ndevice = "cpu"\ndtype = "bfloat16"\n',
            encoding="utf-8",
        )
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        began = time.perf_counter()
        command = [sys.executable, "-m", "lt_trainer", "run", str(recipe)]
        metrics = Path(name) / "run" / "metrics.jsonl"
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)
        while not (metrics.exists() and '"loss"' in metrics.read_text(encoding="utf-8")):
            if process.poll() is not None:
                raise SystemExit("lt train run ended before its first step")
            time.sleep(0.02)
        seconds = time.perf_counter() - began
        step = json.loads(next(line for line in metrics.read_text(encoding="utf-8").splitlines() if '"loss"' in line))
        process.kill()
        process.wait()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_s": seconds, "cpu_s": cpu, "step_s": step["elapsed_s"]}


def floor() -> dict[str, float]:
    """The matrix products of a step without attention's, at the best speed that one thread of this CPU has shown."""
    import torch

    from lt_model import PRESETS, parameters
    from lt_trainer_gpu.peak import measured_matmul

    torch.set_num_threads(1)
    best, _ = measured_matmul(torch.device("cpu"), torch.bfloat16)
    config = dataclasses.replace(PRESETS["litespark-default"], vocab_size=VOCAB)
    weights = sum(row.size for row in parameters(config) if len(row.shape) == 2 and "embed_tokens" not in row.name)
    flops = 6.0 * weights * SEQ_LEN
    return {"flops": flops, "flops_per_s": best, "cpu_s": flops / best}


def machine() -> dict[str, object]:
    """What the figures were made on."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "litgpt": PEERS[0].partition("==")[2],
    }


def page(found: dict[str, Any]) -> str:
    """docs/benchmarks/training.md."""
    trainers = found["trainers"]
    lines = [
        "# Training on a CPU, beside others",
        "",
        "Made by `uv run python tools/bench/train.py --write`, which says how; raw numbers:",
        "[training.json](training.json). One thread, the shape of litespark-default (134.8 M parameters), rows of 1024",
        "tokens, bfloat16 compute with fp32 weights. All trainers take turns step by step in one run; medians of CPU",
        "seconds.",
        "",
        ", ".join(f"{name} {value}" for name, value in found["machine"].items()) + ".",
        "",
        "| trainer | CPU s a step | tokens per CPU s | peak resident | first step, CPU s | loss, first, last tenth |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in trainers.items():
        lines.append(
            f"| {LABELS[name]} | {row['cpu_s']:.2f} | {row['tokens_per_cpu_s']:.0f} | "
            f"{row['peak_rss_bytes'] / 2**30:.2f} GiB | {row['first_step_cpu_s']:.1f} | "
            f"{row['loss_first']:.3f}, {row['loss_last_tenth']:.3f} |"
        )
    lines.append("")
    for name, bar in BARS.items():
        if name in trainers:
            ratio = trainers[name]["cpu_s"] / trainers["lt"]["cpu_s"]
            lines.append(f"- {ratio:.2f} times the speed of {LABELS[name]}; wanted: {bar}.")
    if "litgpt" in trainers:
        share = trainers["lt"]["peak_rss_bytes"] / trainers["litgpt"]["peak_rss_bytes"]
        lines.append(f"- {share:.2f} of litgpt's resident memory; wanted: at most {MEMORY_BAR}.")
    products = found["products"]
    lines.append(
        f"- The matrix products of a step, attention's apart, are {products['flops'] / 1e9:.0f} GFLOP: "
        f"{products['cpu_s']:.1f} s at the {products['flops_per_s'] / 1e9:.0f} GFLOP/s that one thread reached with "
        f"1024^3, and the same for all: "
        + ", ".join(f"{products['cpu_s'] / row['cpu_s']:.0%} of {LABELS[name]}" for name, row in trainers.items())
        + ". Where a CPU multiplies bfloat16 faster beside its other arithmetic, the ratios above are other ones."
    )
    if found.get("start"):
        start = found["start"]
        lines.append(
            f"- `lt train run`, from the command to the end of the first step: {start['wall_s']:.1f} s by the clock, "
            f"{start['step_s']:.1f} s of them that step itself ({start['cpu_s']:.1f} CPU s in all, two threads); "
            "wanted: 5 s."
        )
    lines.append(f"- {next(iter(trainers.values()))['steps']} steps each, the first {found['warmup']} not timed.")
    lines.append("- Whether all learn the same: [training-losses.md](training-losses.md).")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Measure, print JSON, and write the page when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each trainer")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--only", default=",".join(TRAINERS), help="trainers, separated by commas")
    parser.add_argument("--start", action="store_true", help="also from the command to the first step")
    parser.add_argument("--python", help="an interpreter that has litgpt already")
    parser.add_argument("--write", action="store_true", help="write the page and its JSON")
    parser.add_argument("--child", choices=TRAINERS, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--noise", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.seed, options.noise)
        return 0
    names = options.only.split(",")
    found: dict[str, Any] = {"machine": machine(), "warmup": options.warmup, "products": floor()}
    if options.start:
        found["start"] = start_seconds()
    with tempfile.TemporaryDirectory(prefix="lt-bench-env-") as folder:
        python = options.python or (environment(Path(folder) / "env") if "litgpt" in names else "")
        found["trainers"] = compare(names, options.steps, options.warmup, python)
    print(json.dumps(found, indent=1))
    if options.write:
        PAGE.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(page(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
