"""Validation loss of a little mixture of experts and of the dense model of its active size: same text, three seeds.

    uv run python tools/bench/curve.py FOLDER      # prints docs/benchmarks/experts.txt; 20 CPU minutes

The text is Python's standard library, as in the quickstart, in 1,024 ids. Both models read the same rows in the same
order with the same options: 6.1 million tokens, about two epochs. They have 3 layers of width 64; the dense one has 128
inner features, the other 16 experts of 64, two for each token. float32, one thread.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

from results import describe_machine

from lt_trainer.quickstart.corpus import write_corpus
from lt_trainer.run_directory.jsonl import read_jsonl

SHAPE = {"vocab_size": 1024, "tie_word_embeddings": True, "hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
SHAPE |= {"num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 256}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
KINDS = {"dense": {"model_type": "qwen3"}, "experts": {"model_type": "qwen3_moe", **EXPERTS}}
RECIPE = """
data = {store = "train", validation = "validation", seq_len = 256}
batch = {global_batch_size = 16, micro_batch_size = 16}
optimizer = {lr = 0.008, weight_decay = 0.1}
schedule = {max_steps = 1500, warmup_steps = 50}
metrics = {validation_interval = 250}
engine.gpu = {compile = false, dtype = "float32"}
"""


def lt(folder: Path, words: str) -> None:
    """Run a command of lt in a folder, on one thread."""
    command = [str(Path(sys.executable).parent / "lt"), *words.split()]
    subprocess.run(command, check=True, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=-3)


def main() -> None:
    """Train the six models and print the losses."""
    folder = Path(sys.argv[1])
    write_corpus(folder / "corpus", "")
    lt(folder, "data train-tokenizer corpus/train.jsonl --vocab-size 1024 --out tokenizer")
    for name in ("train", "validation"):
        lt(folder, f"data prepare corpus/{name}.jsonl --tokenizer tokenizer --out {name}")
        lt(folder, f"data pack {name} --seq-len 256 --mode bfd")
    (folder / "run.toml").write_text(RECIPE)
    print(describe_machine("torch", "lt-trainer-gpu"))
    for (kind, own), seed in product(KINDS.items(), range(3)):
        (folder / f"{kind}.json").write_text(json.dumps({**SHAPE, **own}))
        sets = f"--set run.dir={kind}-{seed} --set run.seed={seed} --set model.config={kind}.json"
        lt(folder, f"train run run.toml {sets}")
        rows = read_jsonl(folder / f"{kind}-{seed}" / "metrics.jsonl")
        print(f"{kind:8} seed {seed}:", *(f"{row['val_loss']:.3f}" for row in rows if "val_loss" in row), flush=True)


if __name__ == "__main__":
    main()
