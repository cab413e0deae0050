"""Losses of a mixture of experts and of the dense model of its active size, on the same rows with the same options.

    uv run python tools/bench/curve.py little FOLDER  # docs/benchmarks/experts.txt; 15 CPU minutes
    uv run python tools/bench/curve.py text FOLDER    # docs/benchmarks/text.txt, images/text-curve.png; 2 CPU hours

`little` learns Python's standard library, as the quickstart does, with three seeds. `text` learns the documentation of
Linux, which Debian's package holds, once: dense and experts 10 million active parameters and 9.8 million tokens. Beside
them litgpt learns the first two million from the same weights, rows and learning rates.

bfloat16, one thread. Once FOLDER has a run.toml, a study that was stopped goes on.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import train
from results import describe_machine

from lt_trainer.quickstart.corpus import write_corpus
from lt_trainer.run_directory.jsonl import read_jsonl

PACKAGE = "linux-doc-6.1"
LITGPT_STEPS = 500
KINDS = ("dense", "experts")


@dataclass(frozen=True)
class Study:
    """A dense shape by its fields in config.json, the width of each of 16 experts, and the recipe of both."""

    vocab_size: int
    packing: str
    n_seeds: int
    shape: dict[str, Any]
    expert_size: int
    recipe: str

    def configs(self) -> dict[str, dict[str, Any]]:
        """Return config.json of both models."""
        shared = {**self.shape, "vocab_size": self.vocab_size, "rms_norm_eps": 1e-5, "rope_theta": 10000.0}
        experts = {"num_local_experts": 16, "num_experts_per_tok": 2, "intermediate_size": self.expert_size}
        return {
            "dense": {**shared, "model_type": "llama"},
            "experts": {**shared, **experts, "model_type": "mixtral", "sliding_window": None},
        }


STUDIES = {
    "little": Study(
        vocab_size=2048,
        packing="--seq-len 256 --mode concat",
        n_seeds=3,
        shape={"hidden_size": 128, "intermediate_size": 64, "tie_word_embeddings": True, "num_hidden_layers": 3}
        | {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 256},
        expert_size=32,
        recipe="""
data = {store = "train", validation = "validation", seq_len = 256, packing = "concat", document_mask = false}
batch = {global_batch_size = 16, micro_batch_size = 16}
optimizer = {lr = 0.004, weight_decay = 0.1}
schedule = {max_steps = 600, warmup_steps = 100, min_lr = 4e-4}
metrics = {validation_interval = 100, validation_tokens = 65536}
engine.gpu = {compile = false, dtype = "bfloat16"}
""",
    ),
    "text": Study(
        vocab_size=4096,
        packing="--seq-len 512 --mode concat",
        n_seeds=1,
        shape={"hidden_size": 320, "intermediate_size": 864, "tie_word_embeddings": False, "num_hidden_layers": 6}
        | {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 64, "max_position_embeddings": 512},
        expert_size=432,
        recipe="""
data = {store = "train", validation = "validation", seq_len = 512, packing = "concat", document_mask = false}
batch = {global_batch_size = 8, micro_batch_size = 8}
optimizer = {lr = 0.002, weight_decay = 0.1}
schedule = {max_steps = 2400, warmup_steps = 100, min_lr = 2e-4}
metrics = {log_interval = 1, validation_interval = 100, validation_tokens = 65536}
checkpoint = {interval = 200, keep_last = 1}
engine.gpu = {compile = false, dtype = "bfloat16"}
""",
    ),
}


def run(folder: Path, words: str, program: str = "lt") -> None:
    """Run a command in a folder, on one thread."""
    command = [str(Path(sys.executable).parent / program) if program == "lt" else program, *words.split()]
    subprocess.run(command, check=True, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=-3)


def write_linux_documentation(folder: Path) -> None:
    """Write train.jsonl and validation.jsonl: a document of each file, one in fifty held out by its name."""
    folder.mkdir()
    run(folder, f"download {PACKAGE}", "apt-get")
    (archive,) = folder.glob("*.deb")
    run(folder, f"-x {archive.name} package", "dpkg-deb")
    root = folder / "package" / "usr" / "share" / "doc" / PACKAGE / "Documentation"
    texts = {"train": "", "validation": ""}
    for path in sorted(root.rglob("*.gz")):
        name = path.relative_to(root).as_posix()
        if name.endswith((".rst.gz", ".txt.gz", ".yaml.gz")) and not name.startswith("translations/"):
            held_out = int(hashlib.sha256(name.encode()).hexdigest(), 16) % 50 == 0
            text = gzip.decompress(path.read_bytes()).decode()
            texts["validation" if held_out else "train"] += json.dumps({"text": text, "source": name}) + "\n"
    for name, lines in texts.items():
        (folder / f"{name}.jsonl").write_text(lines)


def prepare(folder: Path, study: Study, corpus: str) -> None:
    """Make tokenizer, stores and packs; the last is the sign that all are there."""
    if (folder / "run.toml").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    if corpus == "text":
        write_linux_documentation(folder / "corpus")
    else:
        write_corpus(folder / "corpus", "")
    run(folder, f"data train-tokenizer corpus/train.jsonl --vocab-size {study.vocab_size} --out tokenizer")
    for name in ("train", "validation"):
        run(folder, f"data prepare corpus/{name}.jsonl --tokenizer tokenizer --out {name}")
        run(folder, f"data pack {name} {study.packing}")
    for kind, config in study.configs().items():
        (folder / f"{kind}.json").write_text(json.dumps(config))
    (folder / "run.toml").write_text(study.recipe)


def train_litgpt(folder: Path) -> None:
    """Train litgpt from lt's weights on lt's rows, with its learning rates and decay; write the loss of each step."""
    import numpy as np
    import torch

    from lt_trainer.config.lr_schedule import learning_rate
    from lt_trainer.config.recipe import load, model_config
    from lt_trainer.data.training_data import open_data, open_stream
    from lt_trainer.engine import Topology

    torch.set_num_threads(1)
    recipe = load(folder / "run.toml", overrides=["model.config=dense.json"]).recipe
    data = open_data(recipe)
    alone = Topology(rank=0, world_size=1, dp_rank=0, dp_size=1)
    stream = open_stream(recipe, data, alone, None)
    decay = recipe.optimizer.weight_decay
    step = train.make_litgpt_step(recipe.data.seq_len, model_config(recipe, data.vocab_size), decay)
    lines = ""
    for number in range(1, LITGPT_STEPS + 1):
        rows = stream.next().rows
        ids = np.concatenate([rows.input_ids, rows.labels[:, -1:]], axis=1, dtype=np.int64)
        loss = step(ids, learning_rate(number - 1, recipe.schedule, recipe.optimizer.lr))
        lines += json.dumps({"step": number, "loss": loss}) + "\n"
    (folder / "litgpt.jsonl").write_text(lines)


def losses(path: Path, key: str = "loss") -> dict[int, float]:
    """Return losses by step."""
    return {row["step"]: row[key] for row in read_jsonl(path) if key in row}


def draw(folder: Path) -> None:
    """Draw the training losses, each a mean of 20 steps."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for name in (*KINDS, "litgpt"):
        found = losses(folder / "litgpt.jsonl" if name == "litgpt" else folder / f"{name}-0" / "metrics.jsonl")
        means = [statistics.mean(found[step + i] for i in range(20)) for step in range(1, len(found) - 18, 20)]
        axes.plot([20 * i + 10 for i in range(len(means))], means, "k:" if name == "litgpt" else "-", label=name)
    axes.set(xlabel="step of 4,096 tokens", ylabel="training loss, nats per token", ylim=(3.0, 6.0))
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(folder / "text.png", dpi=110)


def main() -> None:
    """Train the models of a study and print their losses."""
    name, folder = sys.argv[1], Path(sys.argv[2]).absolute()
    if name == "litgpt":
        train_litgpt(folder)
        return
    study = STUDIES[name]
    prepare(folder, study, name)
    print(describe_machine("torch", "lt-trainer-gpu"))
    for kind, seed in product(KINDS, range(study.n_seeds)):
        sets = f"--set run.dir={kind}-{seed} --set run.seed={seed} --set model.config={kind}.json"
        run(folder, f"train run run.toml {sets}")
        found = losses(folder / f"{kind}-{seed}" / "metrics.jsonl", "val_loss")
        print(f"{kind:8} seed {seed}:", *(f"{loss:.3f}" for loss in found.values()), flush=True)
    print(f"{(os.times().children_user + os.times().children_system) / 60:.0f} CPU minutes")
    if name == "text":
        if not (folder / "litgpt.jsonl").exists():
            python = train.create_environment(folder / "env")
            run(folder, f"{Path(__file__).absolute()} litgpt {folder}", python)
        ours, theirs = losses(folder / "dense-0" / "metrics.jsonl"), losses(folder / "litgpt.jsonl")
        apart = [theirs[step] - ours[step] for step in theirs]
        means = f"mean {statistics.mean(apart):.4f}, largest {max(map(abs, apart)):.4f}"
        print(f"litgpt - dense, {len(apart)} steps: {means}")
        draw(folder)


if __name__ == "__main__":
    main()
