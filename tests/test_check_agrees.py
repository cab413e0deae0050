"""Wrong recipes: what ends `run` at once with 64 ends `check` with 64, and `show` and `plan` where they can know it.

Each of them is run in this process with the torch engine on a CPU: a recipe that is refused takes milliseconds.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from lt_ckpt import list_steps
from lt_trainer.checkpointing import async_saver
from lt_trainer.config.recipe import load
from lt_trainer.planning.result import plan_recipe
from lt_trainer.run_directory.run_dir import RunDir
from lt_trainer.training.preflight import SCRATCH_PREFIX, run_preflight
from lt_trainer.training.runner import run

USER_ERROR = 64
SHAPE = ("hidden_size=64", "intermediate_size=128", "n_heads=4", "n_kv_heads=2", "n_layers=2", "vocab_size=320")
ALL_FIELDS = [
    *(f"model.{text}" for text in SHAPE),
    *("model.max_position_embeddings=64", "model.rope_theta=10000", "model.norm_eps=1e-5"),
    "model.tie_word_embeddings=true",
]
"""Every field of the model, so that a recipe is resolved without its pretrained model."""


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """Wrong recipe: what is set, what is wrong around it, and who beside `run` and `check` can know."""

    sets: tuple[str, ...] = ()
    words: str = ""
    known: str = ""
    prepare: Callable[[Path, ExitStack], None] = lambda root, stack: None
    environ: tuple[tuple[str, str], ...] = ()
    changed_text: tuple[str, str] = ("", "")
    in_other_words: bool = False
    """`check` sees the same without trying it, such as a file where a folder belongs."""


def wrong(*sets: str, words: str = "", known: str = "", **others) -> Wrong:
    return Wrong(sets=sets, words=words, known=known, **others)


def write(name: str, content: str | bytes = "not what is expected") -> Callable[[Path, ExitStack], None]:
    def prepare(root: Path, stack: ExitStack) -> None:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)

    return prepare


def pretrained(**changes: object) -> Callable[[Path, ExitStack], None]:
    """A Hugging Face folder `model`, with changes of its config."""

    def prepare(root: Path, stack: ExitStack) -> None:
        import numpy as np
        from safetensors.numpy import save_file

        from lt_model import LlamaConfig, config_to_hf, param_specs

        shape = {name: int(value) for name, _, value in (text.partition("=") for text in SHAPE)}
        values = {"max_position_embeddings": 64, "tie_word_embeddings": True, **shape, **changes}
        config = LlamaConfig(**values)  # pyright: ignore[reportArgumentType]
        (root / "model").mkdir()
        weights = {p.name: np.full(p.shape, 0.01, np.float32) for p in param_specs(config)}
        save_file(weights, root / "model" / "model.safetensors", metadata={"format": "pt"})
        (root / "model" / "config.json").write_text(json.dumps(config_to_hf(config)), encoding="utf-8")

    return prepare


def other_tokenizer(root: Path, stack: ExitStack) -> None:
    pretrained()(root, stack)
    table = {"model": {"vocab": {f"other{i}": i for i in range(320)}}}
    (root / "model" / "tokenizer.json").write_text(json.dumps(table), encoding="utf-8")


def damaged_weights(root: Path, stack: ExitStack) -> None:
    pretrained()(root, stack)
    path = root / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])


def earlier_run(root: Path, stack: ExitStack) -> None:
    """A run that stopped after its first step."""
    assert run(load("run.toml"), environ={}, stop_after_step=1) == 75


def after_earlier_run(name: str, content: str) -> Callable[[Path, ExitStack], None]:
    """A run that stopped after its first step, one of whose files is replaced."""

    def prepare(root: Path, stack: ExitStack) -> None:
        earlier_run(root, stack)
        path = root / "run" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        path.write_text(content, encoding="utf-8")

    return prepare


def folder_instead(name: str) -> Callable[[Path, ExitStack], None]:
    def prepare(root: Path, stack: ExitStack) -> None:
        earlier_run(root, stack)
        (root / "run" / name).unlink(missing_ok=True)
        (root / "run" / name).mkdir()

    return prepare


def in_use(root: Path, stack: ExitStack) -> None:
    stack.enter_context(RunDir.open("run"))


def little_memory(root: Path, stack: ExitStack) -> None:
    patch = stack.enter_context(pytest.MonkeyPatch.context())
    patch.setattr(async_saver, "_available_bytes", lambda: 0)


def little_disk(root: Path, stack: ExitStack) -> None:
    real = list(os.statvfs("/"))
    real[0] = real[1] = 1
    real[4] = 100
    patch = stack.enter_context(pytest.MonkeyPatch.context())
    patch.setattr(os, "statvfs", lambda path: os.statvfs_result(real))


def other_tokens(root: Path, stack: ExitStack) -> None:
    from lt_test_helpers.stores import make_stores

    (root / "other").mkdir()
    make_stores(root / "other", {"train": 30, "validation": 3})


def loader(body: str) -> Callable[[Path, ExitStack], None]:
    def prepare(root: Path, stack: ExitStack) -> None:
        name = f"own_{abs(hash(root))}"
        (root / f"{name}.py").write_text(body, encoding="utf-8")
        text = (root / "run.toml").read_text(encoding="utf-8").replace("own:", f"{name}:")
        (root / "run.toml").write_text(text, encoding="utf-8")
        stack.enter_context(pytest.MonkeyPatch.context()).syspath_prepend(str(root))

    return prepare


EVERYWHERE, RANKS = "show plan", "plan"
OWN_LOADER = ('store = "STORE"', 'loader = "own:rows"')
TABLE: dict[str, Wrong] = {
    # Known from the recipe alone
    "unknown-field": wrong("optimizer.learning_rate=1", words="unknown field", known=EVERYWHERE),
    "unknown-section": wrong("optimiser.lr=1", words="optimi", known=EVERYWHERE),
    "wrong-type": wrong("optimizer.lr=fast", words="optimizer.lr", known=EVERYWHERE),
    "negative-lr": wrong("optimizer.lr=-1", words="optimizer.lr", known=EVERYWHERE),
    "beta-one": wrong("optimizer.beta1=1", words="optimizer.beta1", known=EVERYWHERE),
    "unknown-optimizer": wrong("optimizer.name=adagrad", words="optimizer.name", known=EVERYWHERE),
    "head-size": wrong("model.n_heads=3", words="multiple of 6", known=EVERYWHERE),
    "kv-heads": wrong("model.n_kv_heads=3", words="divisor of 4", known=EVERYWHERE),
    "no-width": wrong("model.hidden_size=0", words="model.hidden_size", known=EVERYWHERE),
    "unknown-preset": wrong("model.preset=llama9", words="unknown preset", known=EVERYWHERE),
    "scaling-without-factor": wrong(
        "model.rope_scaling.high_freq_factor=8", words="has no effect when", known=EVERYWHERE
    ),
    "resize-nothing": wrong("model.resize_vocab=true", words="without model.init_from", known=EVERYWHERE),
    "preset-and-pretrained": wrong(
        *ALL_FIELDS, "model.preset=tiny-2m", "model.init_from=m", words="its own architecture", known=EVERYWHERE
    ),
    "warmup-too-long": wrong("schedule.warmup_steps=50", words="schedule.warmup_steps", known=EVERYWHERE),
    "no-steps": wrong("schedule.max_steps=0", words="schedule.max_steps", known=EVERYWHERE),
    "odd-length": wrong("schedule.max_steps=some epochs", words="schedule.max_steps", known=EVERYWHERE),
    "min-lr-above-lr": wrong("schedule.min_lr=1", words="schedule.min_lr", known=EVERYWHERE),
    "unknown-engine": wrong("run.engine=tpu", words="gpu, neuron", known=EVERYWHERE),
    "unknown-dtype": wrong("engine.gpu.dtype=fp7", words="engine.gpu.dtype", known=EVERYWHERE),
    "budget-without-mode": wrong(
        "engine.gpu.activation_memory_budget=0.3", words="activation_memory_budget", known=EVERYWHERE
    ),
    "compiled-split": wrong(
        "engine.gpu.compile=true", "engine.gpu.attention=split", words="recompiled", known=EVERYWHERE
    ),
    "no-positions": wrong("data.seq_len=0", words="data.seq_len", known=EVERYWHERE),
    "no-data": wrong("data.store=", "data.validation=", words="a run needs data", known=EVERYWHERE),
    "two-kinds-of-data": wrong("data.synthetic=true", words="data.", known=EVERYWHERE),
    "unknown-packing": wrong("data.packing=tight", words="data.packing", known=EVERYWHERE),
    "micro-batch-zero": wrong("batch.micro_batch_size=0", words="batch.micro_batch_size", known=EVERYWHERE),
    "negative-interval": wrong("checkpoint.interval=-1", words="checkpoint.interval", known=EVERYWHERE),
    "keep-none": wrong("checkpoint.keep_last=0", words="checkpoint.keep_last", known=EVERYWHERE),
    "mirror-not-s3": wrong("checkpoint.mirror_url=ftp://x", words="checkpoint.mirror_url", known=EVERYWHERE),
    "unknown-sink": wrong('metrics.sinks=["paper"]', words="metrics.sinks", known=EVERYWHERE),
    "no-tensor-parallel": wrong("parallel.tp=0", words="parallel.tp", known=EVERYWHERE),
    "no-timeout": wrong("fault_tolerance.hang_timeout_s=0", words="hang_timeout_s", known=EVERYWHERE),
    "no-toml": wrong(words="run.toml", known=EVERYWHERE, prepare=write("run.toml", "[run\n")),
    # Known from the recipe and the ranks
    "batch-not-divisible": wrong("batch.global_batch_size=7", words="batch.micro_batch_size = 2", known=EVERYWHERE),
    "tensor-parallel-alone": wrong("parallel.tp=2", words="parallel.tp = 2", known=RANKS),
    "too-few-ranks": wrong("parallel.dp_shard=4", words="need 4 ranks", known=RANKS),
    "reshard-nothing": wrong("engine.gpu.reshard_after_forward=false", words="has no effect", known=RANKS),
    "snapshot-of-a-cpu": wrong("metrics.memory_snapshot_step=2", words="CUDA memory only", known=RANKS),
    "nodes": wrong("parallel.n_nodes=2", words="1 node(s)"),
    "half-an-environment": wrong(words="LOCAL_RANK", environ=(("RANK", "0"),)),
    "profile-later-ranks": wrong("metrics.profile_steps=1", "metrics.profile_ranks=[1]", words="between 0 and 0"),
    "profile-after-the-end": wrong(
        "metrics.profile_steps=2", "metrics.profile_start_step=20", words="ends before step 21"
    ),
    # Known where the data is
    "no-store": wrong("data.store=nowhere", words="nowhere", known=RANKS),
    "no-validation": wrong("data.validation=nowhere", words="nowhere"),
    "not-packed": wrong("data.seq_len=128", words="--seq-len 128"),
    "other-tokenizer-name": wrong("data.tokenizer=other", words="data.tokenizer"),
    "other-validation": wrong("data.validation=other/validation", words="another tokenizer", prepare=other_tokens),
    "other-vocabulary": wrong("model.vocab_size=1000", words="320 ids"),
    "no-loader": wrong(words="cannot be imported", changed_text=OWN_LOADER),
    "loader-without-function": wrong(words="has no attribute", changed_text=OWN_LOADER, prepare=loader("other = 1\n")),
    "loader-that-fails": wrong(
        words="ZeroDivisionError", changed_text=OWN_LOADER, prepare=loader("def rows(**given):\n    1 / 0\n")
    ),
    "loader-of-odd-rows": wrong(
        words="own_", changed_text=OWN_LOADER, prepare=loader("def rows(*a, **given):\n    yield {'input_ids': [1]}\n")
    ),
    # Known on the machine that trains
    "no-such-device": wrong("engine.gpu.device=cuda", words="engine.gpu.device = 'cuda'"),
    "pretrained-nowhere": wrong(*ALL_FIELDS, "model.init_from=nowhere", words="no such file or folder"),
    "hub-without-prefix": wrong(*ALL_FIELDS, "model.init_from=meta/llama", words="is written hf://meta/llama"),
    "hub-without-prefix-first": wrong("model.init_from=meta/llama", words="hf://meta/llama", known=EVERYWHERE),
    "one-safetensors-file": wrong(
        *ALL_FIELDS, "model.init_from=model/model.safetensors", words="give its folder, model,", prepare=pretrained()
    ),
    "pretrained-empty": wrong(
        *ALL_FIELDS, "model.init_from=model", words="unknown checkpoint format", prepare=write("model/notes.txt")
    ),
    "pretrained-other-shape": wrong(
        *ALL_FIELDS, "model.init_from=model", words="has n_layers = 3", prepare=pretrained(n_layers=3)
    ),
    "pretrained-other-tokenizer": wrong(
        *ALL_FIELDS, "model.init_from=model", words="another tokenizer than the model's", prepare=other_tokenizer
    ),
    "pretrained-damaged": wrong(
        *ALL_FIELDS, "model.init_from=model", words="model.safetensors", prepare=damaged_weights
    ),
    "run-dir-is-a-file": wrong(words="run.dir = 'run'", prepare=write("run"), in_other_words=True),
    "run-dir-under-a-file": wrong(
        "run.dir=here/run", words="run.dir = 'here/run'", prepare=write("here"), in_other_words=True
    ),
    "run-dir-of-others": wrong(words="not a run directory", prepare=write("run/thesis.txt")),
    "run-dir-damaged": wrong(words="is damaged", prepare=write("run/.lt-run")),
    "run-dir-of-the-future": wrong(
        words="version 99", prepare=write("run/.lt-run", '{"format": "lt-run", "version": 99}')
    ),
    "run-in-use": wrong(words="in use by process", prepare=in_use),
    "recipe-json-damaged": wrong(words="recipe.json is damaged", prepare=after_earlier_run("recipe.json", "{")),
    "checkpoints-is-a-file": wrong(
        words="checkpoints", prepare=after_earlier_run("checkpoints", ""), in_other_words=True
    ),
    "logs-is-a-file": wrong(words="logs", prepare=after_earlier_run("logs", ""), in_other_words=True),
    "events-is-a-folder": wrong(words="events.jsonl", prepare=folder_instead("events.jsonl"), in_other_words=True),
    "metrics-is-a-folder": wrong(words="metrics.jsonl", prepare=folder_instead("metrics.jsonl"), in_other_words=True),
    "log-is-a-folder": wrong(words="rank00000.log", prepare=folder_instead("logs/rank00000.log"), in_other_words=True),
    "must-not-resume": wrong("checkpoint.resume=false", words="already has checkpoints", prepare=earlier_run),
    "checkpoint-of-another-model": wrong("model.n_layers=3", words="n_layers: 2 there, 3 here", prepare=earlier_run),
    "checkpoint-of-another-order": wrong("run.seed=1", words="seed", prepare=earlier_run),
    "checkpoint-of-other-data": wrong("data.store={validation}", words="another sequence of rows", prepare=earlier_run),
    "checkpoint-of-another-dtype": wrong("engine.gpu.dtype=float64", words="F32", prepare=earlier_run),
    "memory-for-saves": wrong("checkpoint.async_save=true", words="checkpoint.async_save", prepare=little_memory),
    "disk-for-saves": wrong(words="needs", prepare=little_disk, in_other_words=True),
}


@pytest.fixture
def place(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with `run.toml`, which is the working folder."""
    (tmp_path / "run.toml").write_text((prepared / "run.toml").read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def error_of(action: Callable[[], object]) -> str:
    """The message of an error of the user; "" without one. Any other error is a failure of the test."""
    try:
        action()
    except ValueError as exc:
        if getattr(exc, "exit_code", None) != USER_ERROR:
            raise
        return str(exc) or "an error without words"
    return ""


@pytest.mark.parametrize("name", TABLE)
def test_what_ends_a_run_ends_its_check(name: str, prepared: Path, place: Path, stack: ExitStack) -> None:
    case = TABLE[name]
    if name == "no-such-device":
        torch = pytest.importorskip("torch")
        if torch.cuda.is_available():
            pytest.skip("this machine has a CUDA device")
    recipe = place / "run.toml"
    if case.changed_text[0]:
        before, after = (text.replace("STORE", f"{prepared}/train") for text in case.changed_text)
        text = recipe.read_text(encoding="utf-8")
        assert before in text
        text = text.replace(before, after).replace("[model]", "[model]\nvocab_size = 320")
        recipe.write_text(text.replace(f'validation = "{prepared}/validation"\n', ""), encoding="utf-8")
    case.prepare(place, stack)
    sets = [text.format(validation=prepared / "validation") if "{v" in text else text for text in case.sets]
    environ = dict(case.environ)

    checked = error_of(lambda: run_preflight(load("run.toml", overrides=sets), environ=environ))
    assert not list(place.rglob(f"{SCRATCH_PREFIX}*"))
    shown = error_of(lambda: load("run.toml", overrides=sets))
    planned = error_of(
        lambda: plan_recipe(load("run.toml", overrides=sets), device="h100", devices=1, nodes=None, mfu=None)
    )
    steps = list_steps(place / "run" / "checkpoints") if (place / "run" / "checkpoints").is_dir() else []
    ran = error_of(lambda: run(load("run.toml", overrides=sets), environ=environ, stop_after_step=1))
    assert case.words in ran
    assert case.words in checked
    assert checked == ran or case.in_other_words
    known = {name for name, words in (("show", shown), ("plan", planned)) if words}
    assert known == set(case.known.split())
    assert {shown, planned} <= {ran, ""} or name == "no-store"
    if steps:
        assert list_steps(place / "run" / "checkpoints") == steps


def test_the_table_is_long_and_its_recipe_is_right(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(TABLE) >= 50
    run_preflight(load("run.toml"), environ={})
    assert plan_recipe(load("run.toml"), device="h100", devices=1, nodes=None, mfu=None).fits
    assert run(load("run.toml"), environ={}, stop_after_step=1) == 75


def test_the_loss_is_that_of_the_pretrained_model(place: Path, stack: ExitStack) -> None:
    """Weights that are all equal predict every token alike; initial weights of a seed do not."""
    pretrained()(place, stack)

    def first_loss(*sets: str) -> str:
        lines = run_preflight(load("run.toml", overrides=sets), environ={})
        (line,) = [line for line in lines if "one step" in line]
        return line.partition("loss ")[2].split()[0]

    assert first_loss("model.init_from=model", "model.vocab_size=320") == "5.7683"  # ln 320
    assert first_loss() != "5.7683"
