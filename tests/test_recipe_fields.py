"""Fields of the recipe away from their defaults: each changes the run, beyond what repeats the field.

One run of a little model (the gpu engine on the CPU, three steps, in this process) is the baseline of each case; the
case sets one field and names the results that must differ. Two runs of one recipe are equal to the last bit, so every
difference is the field's. What needs ranks, a device or a command has tests of its own.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lt_ckpt import Checkpoint
from lt_data import DataError, Tokenizer, TokenStore, pack, prepare
from lt_data.sources.reader import read_documents
from lt_test_helpers.harness_tasks import write_task
from lt_test_helpers.layouts import whole_batch
from lt_test_helpers.meshes import LATENTS
from lt_test_helpers.runs import run
from lt_trainer.config.recipe import load
from lt_trainer.data import batches
from lt_trainer.engine import StepParts
from lt_trainer.run_directory.jsonl import read_jsonl
from lt_trainer_gpu import peak_flops
from lt_trainer_gpu.engine import GpuEngine

WORDS = "the loss of a model falls when its data is read in order and its state is kept".split()  # noqa: SIM905
STOP_AFTER_STEP = 12
"""More than any case has, so that an ignored schedule.max_steps comes to an end."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """Observable results of a run, by name."""

    values: dict[str, Any]

    def differing(self, other: Result) -> set[str]:
        """Return the names of the results that differ."""
        names = self.values.keys() | other.values.keys()
        return {name for name in names if self.values.get(name) != other.values.get(name)}


@dataclass(frozen=True)
class Case:
    """Field, its value, what both runs set besides, and the results that the field changes."""

    field: str
    value: str
    changes: str
    both: tuple[str, ...] = field(default=())
    base_value: str = ""
    """Value of the field in the baseline, if the default does not do."""


MUON = ("optimizer.name=muon",)
YARN = (
    *("model.rope_scaling.kind=yarn", "model.rope_scaling.factor=4", "model.rope_theta=100"),
    "model.rope_scaling.original_max_position_embeddings=4096",
)
SLIDING = ('model.shape={"family": "mistral", "layers": [{"sliding": true}]}',)
EXPERTS = ("model.preset=tiny-30m-a9m",)
ROPE = ("model.rope_scaling.factor=4", "model.rope_scaling.original_max_position_embeddings=16")
WSD = ("schedule.kind=wsd", "schedule.decay_steps=2")
RAMP = ("batch.ramp.start=2", "batch.ramp.increment=2", "batch.ramp.steps=2")
MIX = ("data.store=", "data.mixture.a.store={stores}/train", "data.mixture.b.store={stores}/validation")
PHASES = (*MIX, "data.mixture.b.phase_weights=[9]")
FP8 = ("model.n_layers=3", "model.hidden_size=64", "engine.gpu.dtype=bfloat16")
BUDGET = ("engine.gpu.compile=true", "engine.gpu.activation_checkpointing=memory_budget")
TASKS = ("evaluation.tasks=[spelled]", "evaluation.include_path={stores}/tasks")
CASES = [
    Case("run.seed", "1", "losses"),
    Case("run.engine", "neuron\nengine.neuron.backend=cpu\nengine.neuron.num_neuroncores=1", "files"),
    Case("run.gc_interval", "2", "collections"),
    Case("model.preset", "tiny-2m", "losses"),
    Case("model.max_position_embeddings", "64", "context"),
    Case(
        "model.vocab_size", "96", "losses", ("data.store=", "data.validation=", "data.synthetic=true"), base_value="64"
    ),
    Case("model.hidden_size", "48", "losses"),
    Case("model.intermediate_size", "80", "losses"),
    Case("model.n_heads", "8", "losses"),
    Case("model.n_kv_heads", "4", "losses"),
    Case("model.n_layers", "1", "losses"),
    Case("model.head_dim", "32", "losses"),
    Case("model.shape", '{"activation": "gelu"}', "losses"),
    Case("model.sliding_window", "4", "losses", SLIDING, base_value="8"),
    Case("model.rope_theta", "100.0", "losses"),
    Case("model.norm_eps", "0.1", "losses"),
    Case("model.init_std", "0.5", "losses"),
    Case("model.init_residual", "flat", "losses"),
    Case("model.tie_word_embeddings", "true", "losses"),
    Case("model.rope_scaling.factor", "8.0", "losses", ROPE[1:], base_value="4"),
    Case("model.rope_scaling.low_freq_factor", "2.0", "losses", ROPE),
    Case("model.rope_scaling.high_freq_factor", "8.0", "losses", ROPE),
    Case("model.rope_scaling.original_max_position_embeddings", "32", "losses", ROPE[:1], base_value="16"),
    Case("model.rope_scaling.kind", "linear", "losses", ROPE),
    Case("model.rope_scaling.beta_fast", "4.0", "losses", YARN),
    Case("model.rope_scaling.beta_slow", "0.1", "losses", YARN),
    Case("model.rope_scaling.truncate", "false", "losses", YARN),
    Case("model.rope_scaling.magnitude", "2.0", "losses", YARN),
    Case("model.rope_scaling.score_magnitude", "2.0", "losses", (*LATENTS, *YARN)),
    Case("data.seq_len", "16", "losses tokens"),
    Case("data.packing", "concat", "losses tokens"),
    Case("data.prefetch", "0", "reading_threads"),
    Case("data.document_mask", "false", "losses"),
    Case("data.shuffle", "false", "losses tokens"),
    Case("data.store", "{stores}/validation", "losses tokens"),
    Case("data.synthetic", "true\ndata.store=", "losses tokens", ("data.validation=", "model.vocab_size=300")),
    Case("data.validation", "{stores}/train", "validation_losses"),
    Case("data.validation_sets.NAME.store", "{stores}/train", "validation_losses"),
    Case("data.mixture.NAME.store", "{stores}/validation", "losses", MIX, base_value="{stores}/train"),
    Case("data.mixture.NAME.weight", "9.0", "losses", MIX),
    Case("data.mixture.NAME.phase_weights", "[5]", "losses", (*PHASES, "data.phase_steps=[2]")),
    Case("data.mixture.NAME.max_epochs", "1", "error", (*MIX, "data.mixture.NAME.weight=99")),
    Case("data.phase_steps", "[2]", "losses", PHASES, base_value="[1]"),
    Case("batch.micro_batch_size", "1", "batch_shapes"),
    Case("batch.global_batch_size", "8", "losses tokens"),
    Case(
        "batch.ramp.start",
        "1",
        "losses tokens",
        ("batch.micro_batch_size=1", *RAMP[2:], "batch.ramp.increment=1"),
        base_value="2",
    ),
    Case(
        "batch.ramp.increment",
        "1",
        "losses tokens",
        ("batch.micro_batch_size=1", "batch.ramp.start=2", *RAMP[2:]),
        base_value="2",
    ),
    Case("batch.ramp.steps", "3", "losses tokens", ("batch.ramp.start=2",), base_value="2"),
    Case("batch.ramp.tokens", "256", "losses tokens", ("batch.ramp.start=2",), base_value="64"),
    Case("optimizer.name", "muon", "losses"),
    Case("optimizer.lr", "0.002", "losses learning_rates"),
    Case("optimizer.weight_decay", "0.9", "losses"),
    Case("optimizer.beta1", "0.5", "losses"),
    Case("optimizer.beta2", "0.5", "losses"),
    Case("optimizer.eps", "0.01", "losses"),
    Case("optimizer.grad_clip", "0.1", "losses"),
    Case("optimizer.decay_embeddings", "true", "losses", ("optimizer.weight_decay=0.9",)),
    Case("optimizer.moments_dtype", "bfloat16", "losses"),
    Case("optimizer.weights_dtype", "bfloat16", "losses", ("engine.gpu.dtype=bfloat16",)),
    Case("optimizer.momentum", "0.5", "losses", MUON),
    Case("optimizer.nesterov", "false", "losses", MUON),
    Case("optimizer.adjust_lr", "original", "losses", MUON),
    Case("optimizer.newton_schulz_steps", "1", "losses", MUON),
    Case("optimizer.newton_schulz_dtype", "float32", "losses", MUON),
    Case("optimizer.lr_scale.embedding", "0.5", "losses"),
    Case("optimizer.lr_scale.head", "0.5", "losses"),
    Case("optimizer.lr_scale.norm", "0.5", "losses"),
    Case("optimizer.lr_scale.matrices", "0.5", "losses"),
    Case("optimizer.z_loss", "0.1", "losses"),
    Case("moe.aux_loss", "0", "losses", EXPERTS),
    Case("moe.router_z_loss", "0.1", "losses", EXPERTS),
    Case("moe.sequence_aux_loss", "0.1", "losses", EXPERTS),
    Case("moe.bias_update_rate", "0.5", "losses", LATENTS),
    Case("schedule.kind", "linear", "learning_rates losses"),
    Case("schedule.max_steps", "5", "learning_rates checkpoints"),
    Case("schedule.warmup_steps", "2", "learning_rates losses"),
    Case("schedule.min_lr", "0.0005", "learning_rates"),
    Case("schedule.decay_steps", "1", "learning_rates", WSD[:1], base_value="2"),
    Case("schedule.decay_shape", "linear", "learning_rates", WSD),
    Case("checkpoint.interval", "1", "checkpoints", ("checkpoint.keep_last=9",)),
    Case("checkpoint.keep_last", "1", "checkpoints", ("checkpoint.interval=1",), base_value="2"),
    Case("checkpoint.keep_every", "1", "checkpoints", ("checkpoint.interval=1", "checkpoint.keep_last=1")),
    Case("metrics.log_interval", "2", "logged_steps"),
    Case("metrics.validation_interval", "1", "validation_losses"),
    Case("metrics.validation_tokens", "-1", "validation_losses"),
    Case("evaluation.tasks", "[spelled]\nevaluation.include_path={stores}/tasks", "evaluations"),
    Case(
        "evaluation.include_path", "{stores}/tasks", "evaluations", ("evaluation.tasks=[spelled]",), "{stores}/others"
    ),
    Case("evaluation.stores", "true", "files"),
    Case("evaluation.interval", "2", "evaluations", TASKS),
    Case("evaluation.limit", "2", "evaluations", TASKS),
    Case("metrics.monitor_interval_s", "0", "files"),
    Case("engine.gpu.dtype", "bfloat16", "losses", ("engine.gpu.dtype=float32",)),
    Case("engine.gpu.attention", "reference", "products"),
    Case("engine.gpu.compile", "true", "compilations"),
    Case("engine.gpu.fp8", "tensorwise", "losses", FP8),
    Case("engine.gpu.fp8_skipped_blocks", "0", "losses", (*FP8, "engine.gpu.fp8=tensorwise")),
    Case("engine.gpu.activation_checkpointing", "full", "products"),
    Case("engine.gpu.activation_memory_budget", "0.25", "compilations", BUDGET),
    Case("engine.gpu.pad_vocab_to_multiple_of", "64", "products"),
    Case("engine.gpu.loss_chunk_tokens", "16", "products"),
    Case("engine.gpu.deterministic", "true", "deterministic"),
]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the stores `train` and `validation`, packed in rows of 32 and 16."""
    root = tmp_path_factory.mktemp("stores")
    for name, documents in (("train", 30), ("validation", 5)):
        (root / f"text-{name}").mkdir()
        for i in range(documents):
            text = " ".join(WORDS[(i * 5 + j * j + j // 7) % len(WORDS)] for j in range(4 + 11 * i % 60))
            (root / f"text-{name}" / f"{i:03}.txt").write_text(f"{name} {i}: {text}.")
    tokenizer = Tokenizer.train((document.text for document in read_documents([root / "text-train"])), vocab_size=300)
    for name in ("train", "validation"):
        prepare([root / f"text-{name}"], tokenizer=tokenizer, out=root / name)
        for seq_len in (16, 32):
            pack(TokenStore(root / name), seq_len=seq_len, mode="bfd")
            pack(TokenStore(root / name), seq_len=seq_len, mode="concat")
    for folder, answers in (("tasks", "abc"), ("others", "abcd")):
        items = [{"context": "the loss", "choices": ["falls", one], "label": 0} for one in answers]
        write_task(root / folder, "spelled", items)
    return root


@pytest.fixture(scope="module")
def train(stores: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Result]:
    """Trains a recipe and returns its results; runs of one recipe are made once."""
    made: dict[tuple[str, ...], Result] = {}
    patch = pytest.MonkeyPatch()
    patch.setattr(os, "fsync", lambda descriptor: None)
    patch.setattr(peak_flops, "measure_matmul_flops", lambda *_: (1e12, "set"))  # 0.3 s

    recorded = record_calls(patch)

    def train_once(*sets: str) -> Result:
        if sets not in made:
            made[sets] = train_anew(*sets)
            gc.collect()
            gc.freeze()  # each run collects all garbage twice, which takes as long as what has been loaded is large
        return made[sets]

    def train_anew(*sets: str) -> Result:
        folder = tmp_path_factory.mktemp("run")
        base = {
            "run": {"dir": str(folder / "run")},
            "model": {"hidden_size": 32, "intermediate_size": 64, "n_heads": 4, "n_kv_heads": 2, "n_layers": 2},
            "data": {"store": str(stores / "train"), "validation": str(stores / "validation"), "seq_len": 32},
            "batch": {"global_batch_size": 4, "micro_batch_size": 2},
            "schedule": {"max_steps": 4, "warmup_steps": 1},
            "metrics": {"log_interval": 1},
            "engine": {"gpu": {"device": "cpu"}},
        }
        overrides = [one.replace("{stores}", str(stores)) for one in sets]
        for calls in recorded.values():
            calls.clear()
        torch.use_deterministic_algorithms(False)
        torch._functorch.config.activation_memory_budget = 1.0
        try:
            code = run(load(base=base, overrides=overrides), environ={}, stop_after_step=STOP_AFTER_STEP)
        except DataError as exc:
            return Result(values={"error": str(exc)})
        return Result(
            values=observe(folder / "run") | {"code": code} | {name: sorted(calls) for name, calls in recorded.items()}
        )

    train_once.anew = train_anew  # type: ignore[attr-defined]
    yield train_once
    torch.use_deterministic_algorithms(False)
    patch.undo()


class Products(TorchDispatchMode):
    """Mode that records the shapes of all matrix products."""

    def __init__(self, shapes: list[Any]) -> None:
        super().__init__()
        self.shapes = shapes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm):
            self.shapes.append(tuple(found.shape))
        return found


def record_calls(patch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """Record the calls that options of speed change: garbage collections, shapes of batches, threads that read."""
    names = ("collections", "batch_shapes", "reading_threads", "compilations", "deterministic", "products")
    recorded: dict[str, list[Any]] = {name: [] for name in names}
    collect, step, to_step = gc.collect, GpuEngine.step, batches.StreamStep

    def collect_recorded(generation: int = 2) -> int:
        recorded["collections"].append(generation)
        return collect(generation)

    def step_recorded(self: GpuEngine, batch: StepParts, lr: float) -> object:
        recorded["batch_shapes"].append(whole_batch(batch).input_ids.shape)
        recorded["deterministic"].append(torch.are_deterministic_algorithms_enabled())
        with Products(recorded["products"]):
            return step(self, batch, lr)

    def read_recorded(*args: Any, **given: Any) -> StepParts:
        thread = threading.current_thread().name
        if thread not in recorded["reading_threads"]:
            recorded["reading_threads"].append(thread)
        return to_step(*args, **given)

    def compile_recorded(function: Any, **given: Any) -> Any:
        recorded["compilations"].append((torch._functorch.config.activation_memory_budget, sorted(given)))
        return function

    patch.setattr(torch, "compile", compile_recorded)
    patch.setattr(gc, "collect", collect_recorded)
    patch.setattr(GpuEngine, "step", step_recorded)
    patch.setattr(batches, "StreamStep", read_recorded)
    return recorded


def observe(folder: Path) -> dict[str, Any]:
    """Return what a run left, without what repeats its recipe and without times."""
    records = read_jsonl(folder / "metrics.jsonl")
    steps = [record for record in records if "loss" in record]
    last = max((folder / "checkpoints").iterdir())
    return {
        "losses": [record["loss"] for record in steps],
        "grad_norms": [record["grad_norm"] for record in steps],
        "learning_rates": [record["learning_rate"] for record in steps],
        "tokens": [record["valid_tokens"] for record in steps],
        "logged_steps": [record["step"] for record in steps],
        "validation_losses": [
            (record["step"], record["val_loss"], record["val_tokens"]) for record in records if "val_loss" in record
        ],
        "evaluations": [
            (record["step"], record["eval_task"], record["eval_items"]) for record in records if "eval_task" in record
        ],
        "checkpoints": sorted(path.name for path in (folder / "checkpoints").iterdir()),
        "files": sorted(path.name for path in folder.rglob("*") if path.is_file()),
        "context": Checkpoint.open(last).manifest.model["max_position_embeddings"],
    }


def test_two_runs_of_one_recipe_are_equal(train: Callable[..., Result]) -> None:
    assert train().differing(train.anew()) == set()  # type: ignore[attr-defined]


def differing(train: Callable[..., Result], case: Case) -> set[str]:
    """Return the results that differ between the two runs of a case."""
    name = case.field.replace("NAME", "b")
    both = [one.replace("NAME", "b") for one in case.both]
    before = train(*both, *([f"{name}={case.base_value}"] if case.base_value else []))
    after = train(*both, *f"{name}={case.value}".splitlines())
    return before.differing(after)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.field)
def test_field_changes_the_run(train: Callable[..., Result], case: Case) -> None:
    assert set(case.changes.split()) <= differing(train, case)
