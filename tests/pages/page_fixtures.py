"""What pages speak of and a machine of tests does not have, on a small scale: texts, a run, models.

`RECIPE` and `SETUP_COMMANDS` build it all once; `PAGES` says what lies in the folder of each page, under the names that
the page uses, and which words of its commands are replaced: names in capitals by things, sizes by smaller ones. A page
that is not named gets an empty folder and no replacement. Every folder has the repository's `examples`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

RECIPE = """
[run]
dir = "{out}"

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
global_batch_size = 4
micro_batch_size = 2

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
dtype = "float32"
"""
"""Heads and layers that can be cut as those of Llama 3 70B are: TP 32 with key/value heads four times, 8 stages."""

SETUP_COMMANDS = [
    "lt train run run.toml",
    "lt train run run.toml --set run.dir=other --set run.seed=7",
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
        replacements: word of a command → what takes its place.
        exit_codes: command → the code with which it ends, where that is not 0.
        needs_s3: the page speaks to an S3 whose bucket is called `bucket`.
    """

    files: Mapping[str, str] = field(default_factory=dict)
    replacements: Mapping[str, str] = field(default_factory=dict)
    exit_codes: Mapping[str, int] = field(default_factory=dict)
    needs_s3: bool = False


LOCAL_RUN_FILES = {"run.toml": "run-here.toml", "store": "train"}
"""A recipe whose store and run lie in the page's folder."""
SINGLE_RANK = {"8": "1"}
"""One rank for eight."""

PAGES: dict[str, Page] = {
    "README.md": Page(
        files={"text": "text/train", "run.toml": "run-here.toml"},
        replacements={"32000": "320", "4096": "64", **SINGLE_RANK},
    ),
    "docs/reference/checkpoint-formats.md": Page(
        files={"source": "run"}, replacements={"SOURCE": "source", "TARGET": "target"}
    ),
    "docs/reference/data-formats.md": Page(
        files={"store": "train", "tokenizer": "tokenizer"},
        replacements={
            "STORE": "store",
            "FORMAT": "litespark",
            "FOLDER": "rows",
            "N": "64",
            "TOKENIZER": "tokenizer",
            "STORE2": "store2",
        },
    ),
    "docs/guides/checkpoints.md": Page(
        files={
            "runs/7b": "run",
            "runs/other": "other",
            "hf-model": "model",
            "hub": "model",
            "llama2-7b": "model",
            "config.json": "model/config.json",
            "nxd-checkpoints": "nxd",
            "llama-3-70b.pt": "pt",
            "torchtitan/step-1000": "dcp",
        },
        replacements={
            "runs/7b/checkpoints/step-00010000": "runs/7b/checkpoints/step-00000004",
            "s3://bucket/kept/step-00010000": "s3://bucket/kept/step-00000004",
            "s3://bucket/runs/7b": "s3://bucket/kept",
            "hf://meta-llama/Llama-2-7b-hf": "hub",
            "hf://meta-llama/Meta-Llama-3-70B": "hub",
        },
        exit_codes={"lt ckpt diff runs/7b runs/other": 1},
        needs_s3=True,
    ),
    "docs/guides/data.md": Page(
        files={"text": "text/train"},
        replacements={"32000": "320", "4096": "64", "256": "8", "report.html": "page.html"},
    ),
    "docs/guides/large-corpora.md": Page(
        files={"text": "text/train", "tokenizer": "tokenizer"}, replacements={"4096": "64", "1000000000": "5000"}
    ),
    "docs/guides/evaluate.md": Page(
        files={"runs/1b": "run", "held-out": "train"}, replacements={"2048": "64", "100": "3"}
    ),
    "docs/guides/release.md": Page(
        files={"runs/tiny": "run", "text": "text/train"},
        replacements={"licences.toml": "examples/release/licences.toml"},
    ),
    "docs/guides/launch.md": Page(files=LOCAL_RUN_FILES, replacements={"RUN.toml": "run.toml", "RUN": "tiny"}),
    "docs/guides/quickstart.md": Page(
        files={"text": "text/train", "heldout": "text/validation", "run.toml": "run-here.toml"},
        replacements={"32000": "320", "2048": "64", "100": "3", **SINGLE_RANK},
    ),
    "docs/guides/troubleshooting.md": Page(
        files={"runs/first": "run", "run.toml": "run-here.toml", "store": "train"},
        replacements={"1200": "3", **SINGLE_RANK},
    ),
    "docs/guides/observability.md": Page(files={"runs/first": "run", "runs/second": "other"}),
    "docs/guides/trainium.md": Page(
        files={"runs/llama2-7b-tp8": "run"},
        replacements={"run.toml": "examples/neuron/llama2-7b-tp8.toml"},
    ),
    "packages/lt-ckpt/README.md": Page(
        files={"run": "run"}, replacements={"PATH": "run", "OUT": "out", "DIR": "exported"}, needs_s3=True
    ),
    "packages/lt-data/README.md": Page(files={"corpus.txt": "text/train"}, replacements={"2048": "320", "4096": "64"}),
    "packages/lt-launch/README.md": Page(
        files=LOCAL_RUN_FILES, replacements={"RUN.toml": "run.toml", "RUN": "runs/run"}
    ),
    "packages/lt-trainer-gpu/README.md": Page(files=LOCAL_RUN_FILES, replacements={"RUN.toml": "run.toml"}),
    "packages/lt-trainer/README.md": Page(
        files=LOCAL_RUN_FILES, replacements={"RUN.toml": "run.toml", "RUN_DIR": "runs/run", **SINGLE_RANK}
    ),
}
