"""Wrong input through the commands: one clear error with the remedy, the right exit code, and nothing saved is lost."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lt_ckpt import find_latest_valid


def error_line(text: str) -> str:
    """The one line of the error; a traceback would be our mistake."""
    assert "Traceback" not in text, text
    (line,) = [line for line in text.splitlines() if line.startswith("error: ")]
    return line


@pytest.fixture
def stopped_run(prepared: Path, lt, tmp_path: Path) -> Path:
    """A run in `tmp_path` that stopped after step 4."""
    lt("train", "run", prepared / "run.toml", "--stop-after-step", "4", cwd=tmp_path, code=75)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data", "prepare", "nowhere", "--tokenizer", "{tokenizer}", "--out", "store"], "nowhere"),
        (["data", "prepare", "empty", "--tokenizer", "{tokenizer}", "--out", "store"], "no text"),
        (["data", "prepare", "broken.jsonl", "--tokenizer", "{tokenizer}", "--out", "store"], "broken.jsonl:2"),
        (["data", "prepare", "latin1.txt", "--tokenizer", "{tokenizer}", "--out", "store"], "UTF-8"),
        (["data", "prepare", "text.txt", "--tokenizer", "nowhere", "--out", "store"], "nowhere"),
        (["data", "prepare", "text.txt", "--tokenizer", "{tokenizer}", "--out", "mine"], "mine"),
        (["data", "pack", "mine", "--seq-len", "64"], "mine"),
        (["model", "show", "llama9"], "llama9"),
        (["ckpt", "verify", "mine"], "mine"),
        (["train", "sample", "mine"], "mine"),
        (["train", "run", "nowhere.toml"], "nowhere.toml"),
        (["quickstart", "--out", "mine"], "choose a new folder with --out"),
        (["quickstart", "--preset", "huge"], "the presets are"),
        (["quickstart", "--steps", "2"], "at least 4"),
        (["quickstart", "--source", "empty"], "0 document(s) with text"),
        (["trian"], "did you mean lt train?"),
    ],
    ids=lambda value: "-".join(value[:3]) if isinstance(value, list) else "",
)
def test_one_clear_error(prepared: Path, lt, tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    (tmp_path / "text.txt").write_text("some text")
    (tmp_path / "broken.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    (tmp_path / "latin1.txt").write_bytes("caf\xe9".encode("latin-1"))
    arguments = [word.format(tokenizer=prepared / "tokenizer") for word in arguments]
    assert message in error_line(lt(*arguments, cwd=tmp_path, code=64))
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("sets", "parts"),
    [
        (["optimizer.learning_rate=1"], ["optimizer.learning_rate", "--set", "unknown field", "optimizer.lr,"]),
        (["optimizer.lr=fast"], ["optimizer.lr", "fast", "--set"]),
        (["model.n_heads=3"], ["model.hidden_size = 64 (", "model.n_heads = 3 (--set)", "multiple of 6"]),
        (["model.n_kv_heads=3"], ["model.n_kv_heads = 3 (--set)", "divisor of 4"]),
        (["batch.global_batch_size=7"], ["batch.global_batch_size = 7 (--set)", "batch.micro_batch_size = 2 ("]),
        (["model.vocab_size=1000"], ["model.vocab_size = 1000 (--set)", "320 ids"]),
        (["data.store=nowhere"], ["nowhere"]),
        (["data.seq_len=128"], ["lt data pack", "--seq-len 128"]),
        (["schedule.warmup_steps=50"], ["schedule.warmup_steps = 50 (--set)", "schedule.max_steps = 20"]),
        (["parallel.tp=2"], ["parallel.tp = 2 (--set)", "start a multiple of 2 ranks"]),
        (["parallel.dp_shard=4"], ["parallel.dp_shard", "need 4 ranks", "has 1"]),
        (["run.engine=tpu"], ["run.engine = 'tpu' (--set)", "gpu, neuron"]),
        (["engine.gpu.dtype=fp8"], ["engine.gpu.dtype", "fp8", "bfloat16"]),
        (["engine.gpu.device=cuda"], ["engine.gpu.device = 'cuda'"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_recipe_that_cannot_run(prepared: Path, lt, tmp_path: Path, sets: list[str], parts: list[str]) -> None:
    if sets == ["engine.gpu.device=cuda"]:
        torch = pytest.importorskip("torch")
        if torch.cuda.is_available():
            pytest.skip("this machine has a CUDA device")
    options = [word for item in sets for word in ("--set", item)]
    line = error_line(lt("train", "run", prepared / "run.toml", *options, cwd=tmp_path, code=64))
    for part in parts:
        assert part in line
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*")) if (tmp_path / "run").exists() else True


def test_a_checkpoint_of_another_model(stopped_run: Path, prepared: Path, lt) -> None:
    line = error_line(lt("train", "run", prepared / "run.toml", "--set", "model.n_layers=3", cwd=stopped_run, code=64))
    assert "checkpoint of another model (n_layers: 2 there, 3 here)" in line
    assert "set run.dir to a new folder" in line
    lt("ckpt", "verify", "run", cwd=stopped_run)


def test_a_second_process_on_the_same_run(stopped_run: Path, prepared: Path, lt) -> None:
    from lt_trainer.run_directory.run_dir import RunDir

    with RunDir.open(stopped_run / "run"):
        line = error_line(lt("train", "run", prepared / "run.toml", cwd=stopped_run, code=64))
    assert f"in use by process {os.getpid()}" in line


def test_a_disk_without_space_keeps_what_was_saved(stopped_run: Path, prepared: Path) -> None:
    """The kernel itself refuses to let files grow: a save fails in the middle of its first tensor file."""

    def no_space() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, 64 * 1024))

    command = [sys.executable, "-m", "lt_trainer", "run", str(prepared / "run.toml")]
    done = subprocess.run(
        command,
        cwd=stopped_run,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        preexec_fn=no_space,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 64, done.stderr
    line = error_line(done.stderr)
    assert "checkpoints" in line
    found, rejected = find_latest_valid(stopped_run / "run" / "checkpoints")
    assert found is not None
    assert found.step == 4
    assert not rejected
    names = {path.name for path in (stopped_run / "run" / "checkpoints").iterdir()}
    assert names == {"step-00000004"}, "what the failed save had written is gone"


def test_a_damaged_checkpoint_is_named_by_verify(stopped_run: Path, lt) -> None:
    folder = stopped_run / "run" / "checkpoints" / "step-00000004"
    (file,) = folder.glob("weights-*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    text = lt("ckpt", "verify", "run", cwd=stopped_run, code=64)
    assert file.name in text
    assert "Traceback" not in text
