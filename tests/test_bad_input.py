"""Wrong input through the commands: one clear error with the remedy, exit code 64, and nothing saved is lost.

What ends `lt train run` at once ends `lt train check` with the same words; recipes that are refused take milliseconds.
"""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from lt_ckpt import find_latest_valid, list_steps
from lt_launch.__main__ import main
from lt_model import ModelConfig, config_to_hf, param_specs
from lt_trainer.run_directory.run_dir import RunDir

SHAPE = {"hidden_size": 64, "intermediate_size": 128, "n_heads": 4, "n_kv_heads": 2, "n_layers": 2, "vocab_size": 320}
Error = Callable[..., str]


def error_line(text: str) -> str:
    """The one line of the error; a traceback would be our mistake."""
    assert "Traceback" not in text, text
    (line,) = [line for line in text.splitlines() if line.startswith("error: ")]
    return line


@pytest.fixture
def error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Error:
    """Runs `lt` in this process, in `tmp_path`, and returns the line of its error."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str | Path) -> str:
        assert main([str(argument) for argument in arguments]) == 64
        return error_line(capsys.readouterr().err)

    return run


@pytest.fixture
def recipe(prepared: Path, tmp_path: Path) -> Path:
    """`run.toml` in `tmp_path`, whose run is `run` beside it."""
    return Path(shutil.copy(prepared / "run.toml", tmp_path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data", "prepare", "nowhere", "--tokenizer", "{tokenizer}", "--out", "store"], "nowhere"),
        (["data", "prepare", "empty", "--tokenizer", "{tokenizer}", "--out", "store"], "no text"),
        (["data", "prepare", "broken.jsonl", "--tokenizer", "{tokenizer}", "--out", "store"], "broken.jsonl:2"),
        (["data", "prepare", "latin1.txt", "--tokenizer", "{tokenizer}", "--out", "store"], "UTF-8"),
        (["data", "prepare", "text.txt", "--tokenizer", "{tokenizer}", "--out", "mine"], "mine"),
        (["data", "pack", "mine", "--seq-len", "64"], "mine"),
        (["model", "show", "llama9"], "llama9"),
        (["ckpt", "verify", "mine"], "mine"),
        (["train", "sample", "mine"], "mine"),
        (["train", "run", "nowhere.toml"], "nowhere.toml"),
        (["quickstart", "--out", "mine"], "choose a new folder with --out"),
        (["quickstart", "--preset", "huge"], "`lt model list` shows all"),
        (["trian"], "did you mean lt train?"),
    ],
    ids=lambda value: "-".join(value[:3]) if isinstance(value, list) else "",
)
def test_one_clear_error(prepared: Path, error: Error, tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    (tmp_path / "text.txt").write_text("some text")
    (tmp_path / "broken.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    (tmp_path / "latin1.txt").write_bytes("caf\xe9".encode("latin-1"))
    assert message in error(*(word.format(tokenizer=prepared / "tokenizer") for word in arguments))
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"
    assert not (tmp_path / "store").exists()


def pretrained(folder: Path, **changes: int) -> None:
    """A Hugging Face folder `model`, with changes of its shape."""
    config = ModelConfig(max_position_embeddings=64, tie_word_embeddings=True, **SHAPE | changes)
    (folder / "model").mkdir()
    weights = {p.name: np.full(p.shape, 0.01, np.float32) for p in param_specs(config)}
    save_file(weights, folder / "model" / "model.safetensors", metadata={"format": "pt"})
    (folder / "model" / "config.json").write_text(json.dumps(config_to_hf(config)))


def test_a_model_without_a_tokenizer_says_so(error: Error, tmp_path: Path) -> None:
    """Its folder has other files beside the weights, as transformers writes them."""
    pretrained(tmp_path)
    (tmp_path / "model" / "generation_config.json").write_text("{}")
    told = "error: model has no tokenizer.json; copy it and tokenizer_config.json into it"
    assert error("train", "sample", "model", "hi") == told


def damaged(folder: Path) -> None:
    pretrained(folder)
    path = folder / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])


def earlier_run(folder: Path) -> None:
    """A run that stopped after its first step."""
    assert main(["train", "run", "run.toml", "--stop-after-step", "1"]) == 75


def three_steps(folder: Path) -> None:
    assert main(["train", "run", "run.toml", "--stop-after-step", "3"]) == 75


def raw_text(folder: Path) -> None:
    (folder / "raw").mkdir()
    (folder / "raw" / "text.txt").write_text("some text")


def someone_elses(folder: Path) -> None:
    (folder / "run").mkdir()
    (folder / "run" / "thesis.txt").write_text("years of work")


def nothing(folder: Path) -> None: ...


INIT = ("model.init_from=model", *(f"model.{name}={value}" for name, value in SHAPE.items()))
RECIPES: dict[str, tuple[tuple[str, ...], list[str], Callable[[Path], None]]] = {
    "unknown-field": (("optimizer.learning_rate=1",), ["optimizer.learning_rate", "--set", "unknown field"], nothing),
    "wrong-type": (("optimizer.lr=fast",), ['optimizer.lr = "fast" (--set)'], nothing),
    "head-size": (("model.n_heads=3",), ["model.hidden_size = 64 (", "model.n_heads = 3 (--set)"], nothing),
    "batch": (("batch.global_batch_size=7",), ["batch.global_batch_size = 7 (--set)", "batch.micro_batch"], nothing),
    "warmup": (("schedule.warmup_steps=50",), ["schedule.warmup_steps = 50 (--set)"], nothing),
    "engine": (("run.engine=tpu",), ['run.engine = "tpu" (--set)', "gpu, neuron"], nothing),
    "engine-field": (("engine.gpu.dtype=fp8",), ["engine.gpu.dtype", "fp8", "bfloat16"], nothing),
    "data-twice": (("data.synthetic=true",), ["data."], nothing),
    "ranks": (("parallel.tp=2",), ["parallel.tp = 2 (--set)", "torchrun RUN.toml --nproc-per-node 2"], nothing),
    "too-few-ranks": (("parallel.dp_shard=4",), ["parallel.dp_shard", "need 4 ranks", "has 1"], nothing),
    "no-store": (("data.store=nowhere",), ['data.store = "nowhere" (--set): cannot read'], nothing),
    "raw-text": (
        ("data.store=raw",),
        ['data.store = "raw" (--set): raw is not a token', "lt data prepare raw"],
        raw_text,
    ),
    "no-validation": (("data.validation=nowhere",), ['data.validation = "nowhere" (--set)'], nothing),
    "not-packed": (("data.seq_len=128",), ["data.store = ", "run.toml)", "lt data pack", "--seq-len 128"], nothing),
    "vocabulary": (("model.vocab_size=1000",), ["model.vocab_size = 1000 (--set)", "320 ids"], nothing),
    "device": (("engine.gpu.device=cuda",), ['engine.gpu.device = "cuda"'], nothing),
    "no-pretrained": (("model.init_from=nowhere", *INIT[1:]), ["nowhere"], nothing),
    "other-pretrained": (INIT, ["has n_layers = 3"], lambda folder: pretrained(folder, n_layers=3)),
    "damaged-pretrained": (INIT, ["model.safetensors"], damaged),
    "run-of-others": ((), ["not a run directory"], someone_elses),
    "run-is-a-file": ((), ["run"], lambda folder: (folder / "run").touch()),
    "no-resume": (("checkpoint.resume=false",), ["already has checkpoints"], earlier_run),
    "other-model": (("model.n_layers=3",), ["another model (n_layers: 2 there, 3 here)", "run.dir"], earlier_run),
    "other-order": (("run.seed=1",), ["error: run.dir = ", "seed: 0 before, 1 now", "run.dir to a new"], earlier_run),
    "fewer-steps": (
        ("schedule.max_steps=2", "schedule.warmup_steps=1"),
        ["schedule.max_steps = 2 (--set)", "has done 3 steps"],
        three_steps,
    ),
    "wrong-init": (("model.init_from=gone",), ['model.init_from = "gone" (--set)'], earlier_run),
    "other-dtype": (("engine.gpu.dtype=float64",), ["F32"], earlier_run),
}


@pytest.mark.parametrize("name", RECIPES)
def test_what_ends_a_run_ends_its_check(recipe: Path, error: Error, tmp_path: Path, name: str) -> None:
    sets, parts, prepare = RECIPES[name]
    if name == "device" and pytest.importorskip("torch").cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    prepare(tmp_path)
    options = [word for text in sets for word in ("--set", text)]
    checked = error("train", "check", recipe, *options)
    ran = error("train", "run", recipe, *options)
    assert [part for part in parts if part not in ran] == []
    assert [part for part in parts if part not in checked] == []
    if prepare is earlier_run:
        assert [step for step, _ in list_steps(tmp_path / "run" / "checkpoints")] == [1]
    if prepare is someone_elses:
        assert os.listdir(tmp_path / "run") == ["thesis.txt"]


def test_a_second_process_on_the_same_run(recipe: Path, error: Error) -> None:
    with RunDir.open(recipe.parent / "run"):
        assert f"in use by process {os.getpid()}" in error("train", "run", recipe)


def test_a_disk_without_space_keeps_what_was_saved(recipe: Path, error: Error, tmp_path: Path) -> None:
    """The kernel itself refuses to let files grow: a save fails in the middle of its first tensor file."""
    earlier_run(tmp_path)

    def no_space() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, 64 * 1024))

    command = [sys.executable, "-m", "lt_trainer", "run", str(recipe)]
    done = subprocess.run(command, preexec_fn=no_space, capture_output=True, text=True, check=False)
    assert done.returncode == 64, done.stderr
    assert "checkpoints" in error_line(done.stderr)
    found, rejected = find_latest_valid(tmp_path / "run" / "checkpoints")
    assert (found and found.step, rejected) == (1, [])
    assert os.listdir(tmp_path / "run" / "checkpoints") == ["step-00000001"], "what the failed save had written is gone"


def test_a_damaged_checkpoint_is_named_by_verify(
    recipe: Path, error: Error, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier_run(tmp_path)
    (file,) = (tmp_path / "run" / "checkpoints" / "step-00000001").glob("weights-*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    capsys.readouterr()
    assert main(["ckpt", "verify", "run"]) == 64
    assert file.name in "".join(capsys.readouterr())
