"""Inputs of the options' tests: texts, stores, models, a run with three checkpoints; and calls over them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.core import TyperCommand

from lt_data import TokenStore, pack, prepare, read_documents, train_bpe
from lt_launch.__main__ import main
from lt_model import LlamaConfig, config_to_hf, param_specs
from lt_test_helpers.option_cases import WORDS, Call
from lt_trainer.config.recipe import load
from lt_trainer.resilience.stop_signals import STOP_SIGNALS
from lt_trainer.training.runner import run

TOOLS = Path(__file__).resolve().parents[2] / "tools"
SHAPE = {"hidden_size": 32, "intermediate_size": 48, "n_heads": 4, "n_kv_heads": 2, "n_layers": 4}
BASE = {
    "model": "\n".join(f"{name} = {value}" for name, value in SHAPE.items()),
    "batch": "global_batch_size = 4\nmicro_batch_size = 2",
    "schedule": "max_steps = 3\nwarmup_steps = 1",
    "checkpoint": "interval = 1",
}
"""Sections of a recipe, in TOML."""


@pytest.fixture(autouse=True)
def signal_handlers() -> Iterator[None]:
    """A training command that has ended ignores stop signals, and so would all that this process starts."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the commands read: texts, JSON lines, stores, models, a run with three checkpoints."""
    root = tmp_path_factory.mktemp("world")
    (root / "text").mkdir()
    for i in range(24):
        text = " ".join(WORDS[(i * 5 + j * j + j // 7) % len(WORDS)] for j in range(2 + 11 * i % 60))
        (root / "text" / f"{i:03}.txt").write_text("twice" if i in (3, 9) else f"{i}: {text} <|eos|>.")
    (root / "text" / "note.md").write_text("a note that only another suffix finds, over and over: " + "zeta eta " * 20)
    lines = [{"text": f"line {i} {'x' * i}", "body": f"body {i * i}", "ids": [i, i + 1, 7]} for i in range(12)]
    lines = [line | ({"url": f"at {i}"} if i % 3 else {"url": i}) for i, line in enumerate(lines)]
    (root / "lines.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    (root / "bad.jsonl").write_text('{"text": "good"}\n{"text": 5}\n')
    (root / "ids.jsonl").write_text("\n".join(json.dumps({"input_ids": [i, 9], "other": [9, 9, i]}) for i in range(5)))
    texts = [document.text for document in read_documents([root / "text"])]
    tokenizer = train_bpe(iter(texts), vocab_size=300)
    other = train_bpe(iter(texts[:3]), vocab_size=280)
    for name, one in (("tokenizer", tokenizer), ("tokenizer2", other)):
        one.save(root / name)
    for name in ("store", "unpacked"):
        prepare([root / "text"], tokenizer=tokenizer, out=root / name)
    for mode in ("bfd", "concat"):
        for seq_len in (12, 16, 32):
            pack(TokenStore.open(root / "store"), seq_len=seq_len, mode=mode)
    pack(TokenStore.open(root / "unpacked", packs=root / "packs"), seq_len=16)
    make_model(root / "hf", n_kv_heads=2)
    make_model(root / "mha", n_kv_heads=4)
    make_model(root / "large", n_kv_heads=2, factor=1e6)
    base = tomllib.loads("\n".join(f"[{name}]\n{body}" for name, body in BASE.items()))
    base |= {"data": {"store": str(root / "store"), "seq_len": 16}}
    base |= {"engine": {"gpu": {"device": "cpu", "dtype": "bfloat16"}}}
    for name, sets in (("run", ()), ("run2", ("run.seed=1", "schedule.max_steps=1", "schedule.warmup_steps=0"))):
        assert run(load(base=base, overrides=[*sets, f"run.dir={root / name}"]), environ={}) == 0
    (root / "checkpoint").symlink_to(sorted((root / "run" / "checkpoints").iterdir())[-1])
    shutil.copytree(root / "run", root / "moved")
    for path in (root / "moved").rglob("*.toml"):
        path.write_text(path.read_text().replace(str(root / "store"), str(root / "gone")))
    for path in (root / "moved").rglob("*.json*"):
        path.write_text(path.read_text().replace(str(root / "store"), str(root / "gone")))
    (root / "record_maps.py").write_text(
        "def shout(record, times=1):\n    return record | {'text': record['text'].upper() * times}\n"
    )
    write_files(root)
    make_torn(root)
    return root


def make_torn(root: Path) -> None:
    """Write an NxD checkpoint in which the replicas of one key/value head differ."""
    import torch

    options = ["--to", "nxd", "--tp", "4", "--qkv-linear", "--kv-size-multiplier", "2"]
    assert main(["ckpt", "convert", str(root / "hf"), str(root / "torn"), *options]) == 0
    path = min((root / "torn").rglob("*tp_rank_01*.pt"))
    tensors = torch.load(path, weights_only=True)
    name = min(name for name in tensors if name.endswith("weight_k"))
    torch.save(tensors | {name: tensors[name] + 1}, path)
    (root / "torn" / "SHA256SUMS").unlink()


def write_files(root: Path) -> None:
    """Write the recipes, jobs, profiles and other small files."""
    run_toml = {
        **BASE,
        "data": f'store = "{root}/store"\nseq_len = 16',
        "run": 'dir = "run"\nengine = "gpu"',
        "engine.gpu": 'device = "cpu"',
    }
    texts = {
        "run.toml": "\n".join(f"[{name}]\n{body}" for name, body in run_toml.items()),
        "neuron.toml": f'[data]\nstore = "{root}/store"\n[run]\nengine = "neuron"\n'
        '[engine.neuron]\ncompile_cache = "/nowhere"\n',
        "checkpoint-config.json": json.dumps(config_to_hf(LlamaConfig(vocab_size=300, **SHAPE))),
        "hyperparameters.json": '{"MAX_STEPS": "1"}',
        "short.json": '{"SEQ_LEN": "8"}',
        "wrong.json": '{"N_HEADS": "3"}',
        "tasks/spelled.jsonl": json.dumps({"context": "the loss", "choices": ["falls", "rises"], "label": 0}),
        "job.toml": '[job]\nname = "one"\nargv = ["true"]\n',
        "stages.toml": '[pipeline]\nname = "two"\n[[stages]]\nname = "first"\nargv = ["true"]\n'
        '[[stages]]\nname = "second"\nargv = ["false"]\n',
        "slurm.toml": '[slurm]\npartition = "p1"\n',
        "other.toml": '[slurm]\npartition = "p2"\n',
        "hosts": "host-a slots=1\n",
        "hosts2": "host-b slots=1\n",
    }
    for compiler in ("neuronxcc-1.0", "neuronxcc-2.0"):
        texts[f"cache/{compiler}/MODULE_1+d4/model.neff"] = "x" * 1000
        texts[f"cache/{compiler}/MODULE_1+d4/model.done"] = ""
        texts[f"cache/{compiler}/MODULE_2+d4/model.log"] = "Failed compilation"
        for module in (1, 2):
            texts[f"cache/{compiler}/MODULE_{module}+d4/model.hlo_module.pb"] = "graph"
            texts[f"cache/{compiler}/MODULE_{module}+d4/compile_flags.json"] = "[]"
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")


def make_model(folder: Path, *, n_kv_heads: int, factor: float = 1.0) -> None:
    """Write a Hugging Face folder with random float32 weights."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        n_heads=8 if n_kv_heads == 2 else 4,
        n_kv_heads=n_kv_heads,
        n_layers=4,
        max_position_embeddings=64,
    )
    folder.mkdir()
    rng = np.random.default_rng(0)
    weights = {p.name: (rng.standard_normal(p.shape) * factor).astype(np.float32) for p in param_specs(config)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_to_hf(config)))


@pytest.fixture(scope="session")
def call(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Call]:
    """Calls of command lines over these inputs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setenv("COLUMNS", "200")
        patch.setenv("NO_COLOR", "1")
        patch.setenv("HOME", str(world))
        patch.syspath_prepend(world)
        yield Call(world, lambda: tmp_path_factory.mktemp("called"))


@pytest.fixture
def ignore(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Plants, until the test ends, that an option is read, checked and stored but otherwise ignored."""
    monkeypatch.syspath_prepend(TOOLS)
    from ignored_option import sitecustomize as plant
    from option_effects import read_effects

    def plant_ignored(name: str) -> None:
        spec = json.loads(options_by_name()[name].ignored(read_effects()[name].instead))
        if spec["kind"] == "field":
            cls = getattr(import_module(spec["module"]), spec["class"])
            default = cls.__dataclass_fields__[spec["name"]].default
            monkeypatch.setattr(cls, spec["name"], plant.IgnoredField(spec["name"], default), raising=False)
        else:
            monkeypatch.setattr(TyperCommand, "invoke", plant.invoke_without(TyperCommand.invoke, spec))

    return plant_ignored


@cache
def options_by_name() -> dict[str, Any]:
    """Return all options; the folder of the tools must be importable."""
    from option_schema import read_options

    return {option.name: option for option in read_options()}
