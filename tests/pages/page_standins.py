"""What pages speak of and a machine of tests does not have, on a small scale: texts, a run, models.

`RECIPE` and `MAKE` build it all once; `PAGES` says what lies in the folder of each page, under the names that the page
uses, and which words of its commands are replaced: names in capitals by things, sizes by smaller ones. A page that is
not named gets an empty folder and no replacement. Every folder has the repository's `examples`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

RECIPE = """
[run]
out = "{out}"

[model]
hidden_size = 128
intermediate_size = 256
n_heads = 32
n_kv_heads = 8
n_layers = 8
max_position_embeddings = 256

[data]
store = "{store}"
seq_len = 64

[batch]
global_batch = 4
micro_batch = 2

[optimizer]
lr = 3e-3

[schedule]
max_steps = 4
warmup_steps = 1
min_lr = 3e-4

[checkpoint]
interval = 2

[metrics]
log_interval = 1

[engine.gpu]
device = "cpu"
"""
"""Heads and layers that can be cut as those of Llama 3 70B are: TP 32 with key/value heads four times, 8 stages."""

MAKE = [
    "lt train run run.toml",
    "lt train run run.toml --set run.out=other --set run.seed=7",
    "lt ckpt export run --out model",
    "lt ckpt convert run nxd --to nxd --optimizer --dp 2 --tp 4 --tag step_4",
    "lt ckpt convert model dcp --to dcp",
    "lt ckpt convert model pt --to pt",
]
"""From the recipe above to a model in every format, in the folder of stand-ins."""


@dataclass(frozen=True, kw_only=True)
class Page:
    """What a page needs.

    Attributes:
        files: name in the page's folder → name in the folder of stand-ins; `examples` is that of the repository.
        words: word of a command → what takes its place.
        exits: command → the code with which it ends, where that is not 0.
        s3: the page speaks to an S3 whose bucket is called `bucket`.
    """

    files: Mapping[str, str] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)
    exits: Mapping[str, int] = field(default_factory=dict)
    s3: bool = False


HERE = {"run.toml": "run-here.toml", "store": "train"}
"""A recipe whose store and run lie in the page's folder."""
ONE = {"8": "1"}
"""One rank for eight."""
NEURON = "examples/neuron/llama3-70b-tp32-pp8.toml"

PAGES: dict[str, Page] = {
    "README.md": Page(
        files={"text": "text/train", "run.toml": "run-here.toml"},
        words={"TEXT...": "text", "32000": "320", "4096": "64", "100": "3"},
    ),
    "docs/formats/README.md": Page(files={"source": "run"}, words={"SOURCE": "source", "TARGET": "target"}),
    "docs/formats/data-exports.md": Page(
        files={"store": "train", "tokenizer": "tokenizer"},
        words={
            "STORE": "store",
            "FORMAT": "hf",
            "FOLDER": "rows",
            "N": "64",
            "TOKENIZER": "tokenizer",
            "STORE2": "store2",
        },
    ),
    "docs/guides/checkpoints-in-s3.md": Page(
        files={"runs/7b": "run", "hf-model": "model"},
        words={
            "runs/7b/checkpoints/step-00010000": "runs/7b/checkpoints/step-00000004",
            "s3://bucket/kept/step-00010000": "s3://bucket/kept/step-00000004",
            "s3://bucket/runs/7b": "s3://bucket/kept",
        },
        s3=True,
    ),
    "docs/guides/conversion.md": Page(
        files={
            "hub": "model",
            "llama2-7b": "model",
            "config.json": "model/config.json",
            "checkpoints": "nxd",
            "llama-3-70b.pt": "pt",
            "torchtitan/step-1000": "dcp",
            "other-run": "other",
        },
        words={"hf://meta-llama/Llama-2-7b-hf": "hub", "hf://meta-llama/Meta-Llama-3-70B": "hub"},
        exits={"lt ckpt diff run other-run": 1},
    ),
    "docs/guides/launch.md": Page(files=HERE, words={"RUN.toml": "run.toml", "RUN": "tiny"}),
    "docs/guides/observability.md": Page(files={"runs/first": "run", "runs/second": "other"}),
    "docs/guides/seed-arcee-trainium.md": Page(
        files={"runs/llama2-7b-tp8": "run"},
        words={"run.toml": "examples/neuron/llama2-7b-tp8.toml"},
    ),
    "docs/guides/seed-hyperpod-trainium.md": Page(
        files={"runs/llama3-70b-tp32-pp8": "run", "hub": "model"},
        words={"run.toml": NEURON, "hf://meta-llama/Meta-Llama-3-70B": "hub"},
    ),
    "docs/guides/seed-smp.md": Page(
        exits={
            "lt train plan examples/smp-70b.toml --devices 8 --device h100 --set parallel.dp_replicate=8 "
            "--set parallel.dp_shard=1": 1
        }
    ),
    "docs/guides/seed-litespark.md": Page(
        files={"text": "text/train", "tokenizer": "tokenizer"}, words={"SOURCE...": "text", "PATH": "tokenizer"}
    ),
    "packages/lt-ckpt/README.md": Page(
        files={
            "pretrained_weight": "dcp",
            "config.json": "model/config.json",
            "run": "run",
            "other": "run",
            "nxd": "nxd",
        },
        words={
            "PATH": "run",
            "OTHER": "other",
            "OUT": "out",
            "RECUT": "recut",
            "COPY": "copy",
            "DIR": "exported",
            "NXD": "nxd",
            "FILE": "config.json",
        },
        s3=True,
    ),
    "packages/lt-data/README.md": Page(
        files={"runs/first": "run"}, words={"2048": "320", "0:4": "0:2", "1200": "3"}, s3=True
    ),
    "packages/lt-launch/README.md": Page(files=HERE, words={"RUN.toml": "run.toml", "RUN": "runs/run"}),
    "packages/lt-model/README.md": Page(files={"path/to": "model"}),
    "packages/lt-trainer-gpu/README.md": Page(files=HERE, words={"RUN.toml": "run.toml"}),
    "packages/lt-trainer/README.md": Page(files=HERE, words={"RUN.toml": "run.toml", "RUN_DIR": "runs/run", **ONE}),
}
