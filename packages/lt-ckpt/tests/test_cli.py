import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import rich.progress

from lt_ckpt import Checkpoint, files, open_source
from lt_ckpt.lt_format import save_lt


def run(*args, env=None):
    done = subprocess.run(
        [sys.executable, "-m", "lt_ckpt", *map(str, args)],
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, **(env or {})},
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def main(capsys, monkeypatch):
    from lt_ckpt.__main__ import main

    def call(*args):
        monkeypatch.setattr(sys, "argv", ["lt-ckpt", *map(str, args)])
        code = main()
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_nothing_that_others_wrote_reaches_the_terminal_unescaped(tmp_path, toy, main):
    folder = tmp_path / "a\x1b[2J\u202eb"
    toy.save(folder, 3)
    code, out, err = main("verify", folder)
    assert (code, err) == (0, "")
    assert "a\\x1b[2J\\u202eb" in out
    code, out, err = main("inspect", folder / "no\x1b]0;title\x07where")
    assert code == 64
    assert "no\\x1b]0;title\\x07where" in err
    assert not {"\x1b", "\x07", "\u202e"} & set(out + err)


def test_inspect(tmp_path, toy, main):
    path = toy.save(tmp_path, 3)
    code, out, _ = main("inspect", tmp_path)
    assert code == 0
    assert f"{path}\nstep        3\n" in out
    assert "weights     3 tensors, 61 elements, F32, BF16, 188 bytes" in out
    assert "tokenizer   1: tokenizer.json" in out
    assert "data        row=24" in out
    code, out, _ = main("inspect", "--json", path)
    shown = json.loads(out)
    assert (shown["step"], shown["world_size"], shown["scalars"]) == (3, 2, {"lr": 0.1})
    assert shown["groups"]["weights"]["dtypes"] == {"F32": 33, "BF16": 28}


def test_verify(tmp_path, toy, main):
    one, two = toy.save(tmp_path, 1), toy.save(tmp_path, 2)
    code, out, err = main("verify", tmp_path)
    assert (code, err) == (0, "")
    assert out.startswith(f"ok: {two}: 14 files, ")
    assert f"ok: {one}: " in out
    file = two / "weights-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    (one / "notes").write_text("", encoding="utf-8")
    code, out, err = main("verify", tmp_path)
    assert code == 64
    assert "broken: " in out
    assert "the bytes of tensor b.weight have changed" in out
    assert f"extra: {one}/notes is not part of the checkpoint" in out
    assert err == f"error: {tmp_path}: 2 of 2 checkpoints did not verify\n"
    file.write_bytes(file.read_bytes()[:-1])
    code, out, err = main("inspect", tmp_path)
    assert code == 0
    assert f"instead of {two}: " in err
    assert "step        1" in out


@pytest.fixture
def hashed(monkeypatch) -> list[int]:
    """Bytes of each range of a file that is hashed."""
    ranges: list[int] = []
    hash_range = files.hash_range

    def record(digest, path, position, n_bytes, count_bytes):
        ranges.append(n_bytes)
        hash_range(digest, path, position, n_bytes, count_bytes)

    monkeypatch.setattr(files, "hash_range", record)
    return ranges


@pytest.fixture
def bars(monkeypatch) -> list[tuple[int, int]]:
    """Bytes done and in all, each time that a progress bar moves."""
    moves: list[tuple[int, int]] = []

    def update(_bars, _task, *, completed, total):
        moves.append((completed, total))

    monkeypatch.setattr(rich.progress.Progress, "update", update)
    return moves


@pytest.fixture
def run_folder(tmp_path, models, main):
    """A run with two checkpoints of a model, and the bytes of one."""
    model = models.make(tmp_path / "model", n_layers=2)
    for step in (1, 2):
        source = open_source(model)
        save_lt(replace(source, format_info={"step": step}), tmp_path / "run" / "checkpoints")
    return tmp_path / "run"


def n_bytes_of(run_folder) -> int:
    return Checkpoint.open(run_folder / "checkpoints" / "step-00000002").manifest.n_bytes


def test_inspect_of_a_run_reads_headers_only(run_folder, main, hashed):
    code, out, _ = main("inspect", run_folder)
    assert (code, hashed) == (0, [])
    assert "step        2" in out


@pytest.mark.parametrize("command", ["export", "convert", "diff", "verify"])
def test_each_byte_of_a_runs_checkpoint_is_hashed_once_with_a_bar(run_folder, main, hashed, bars, command):
    model, out = run_folder.parent / "model", run_folder.parent / "out"
    arguments = {
        "export": [run_folder, "--out", out],
        "convert": [run_folder, out, "--to", "pt"],
        "diff": [run_folder, model],
        "verify": [run_folder / "checkpoints" / "step-00000002", "--against", model],
    }
    code, _, err = main(command, *arguments[command])
    assert (code, err) == (0, "")
    n_bytes = n_bytes_of(run_folder)
    assert sum(hashed) == n_bytes
    assert (n_bytes, n_bytes) in bars


def test_verify_of_a_run_against_a_model_hashes_each_checkpoint_once(run_folder, main, hashed):
    code, _, err = main("verify", run_folder, "--against", run_folder.parent / "model")
    assert (code, err) == (0, "")
    assert sum(hashed) == 2 * n_bytes_of(run_folder)


def test_prune_shows_what_it_verifies(run_folder, main, bars):
    n_bytes = n_bytes_of(run_folder)
    assert main("prune", run_folder, "--keep-last", "1")[0] == 0
    assert (n_bytes, n_bytes) in bars


def test_errors_are_one_line_and_64(tmp_path, main):
    code, out, err = main("inspect", tmp_path / "none")
    assert (code, out) == (64, "")
    assert err.startswith(f"error: {tmp_path / 'none'}: no such file or folder; ")
    for name in ("meta-llama/Llama-3.2-1B", "https://huggingface.co/meta-llama/Llama-3.2-1B/"):
        _, _, err = main("convert", name, tmp_path / "x", "--to", "hf")
        assert "no such file or folder; a model of the Hugging Face hub is written hf://ORG/NAME" in err
    for name in ("model.safetensors", "config.json", "model.safetensors.index.json"):
        (tmp_path / name).touch()
        _, _, err = main("convert", tmp_path / name, tmp_path / "x", "--to", "hf")
        assert f"one file of a Hugging Face model; give its folder, {tmp_path}, with config.json and " in err
    assert main("export", tmp_path, "--out", tmp_path / "x")[0] == 64
    assert main("nonsense")[0] == 64


def test_bugs_are_a_traceback_and_70_and_an_interrupt_130(tmp_path, main, monkeypatch):
    import lt_ckpt.discovery

    def broken(path, *, verify):
        raise RuntimeError("bug")

    def interrupted(path, *, verify):
        raise KeyboardInterrupt

    (tmp_path / "step-00000001").mkdir()
    monkeypatch.setattr(lt_ckpt.discovery, "resolve_checkpoint", broken)
    code, _, err = main("inspect", tmp_path)
    assert code == 70
    assert "Traceback" in err
    monkeypatch.setattr(lt_ckpt.discovery, "resolve_checkpoint", interrupted)
    assert main("inspect", tmp_path)[0] == 130


def test_without_typer_the_install_line_is_printed(tmp_path):
    (tmp_path / "typer.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'typer'\", name='typer')", encoding="utf-8"
    )
    code, out, err = run("--help", env={"PYTHONPATH": str(tmp_path)})
    assert (code, out) == (64, "")
    assert err == "lt-ckpt: the command needs typer: pip install 'lt-ckpt[cli]'\n"


def test_neither_the_package_nor_its_commands_load_torch():
    code = "import sys, lt_ckpt, lt_ckpt.cli.convert\nassert not {'torch', 'transformers', 'boto3'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("data", [b"some notes\n", b"\x93NUMPY\x01\0", b"PK\x05\x06" + bytes(18), b"", b"GG"])
def test_a_file_that_is_no_model_is_said_to_be_none(tmp_path, main, data):
    (tmp_path / "x").write_bytes(data)
    for args in (("inspect", tmp_path / "x"), ("convert", tmp_path / "x", tmp_path / "out", "--to", "hf")):
        code, _, err = main(*args)
        assert code == 64
        assert "--config" not in err, err
        assert "torch" in err, err


def test_errors_of_options(tmp_path, main, models):
    from lt_ckpt import ConvertOptions, convert_checkpoint, open_source
    from lt_ckpt.torchfile.file import write_pt

    hf = models.make(tmp_path / "hf")
    lt = convert_checkpoint(open_source(hf), tmp_path / "lt", ConvertOptions(format="lt"))
    to_nxd = (tmp_path / "out", "--to", "nxd")
    for args, message in (
        ((lt, *to_nxd, "--master-weights"), "has no group 'master'; it has weights"),
        ((hf, *to_nxd, "--master-weights"), "--master-weights have no effect on hf"),
        ((hf, *to_nxd, "--tp", 0), "tp = 0: must be a whole number"),
        ((hf, *to_nxd, "--tp", 5), "4 query heads do not divide by tp 5"),
        ((hf, *to_nxd, "--pp", 99), "choose a smaller pp"),
        ((hf, *to_nxd, "--layout", "v3"), "layout = 'v3': must be one of"),
        ((hf, *to_nxd, "--tp", 4), "choose qkv_linear with kv_size_multiplier 2"),
        ((hf, tmp_path / "out", "--to", "hf", "--tp", 2), "options of NxD have no effect with --to hf"),
        ((hf, tmp_path / "out", "--to", "hf", "--max-shard-gb", 0), "max-shard-gb"),
    ):
        code, _, err = main("convert", *args)
        assert (code, message in err) == (64, True), err
    write_pt(tmp_path / "x.pt", {"step": 3})
    write_pt(tmp_path / "y.pt", {"model": {}, "module": {}, "other": {}})
    for name, keys in (("x.pt", "'step'"), ("y.pt", "'model', 'module', 'other'")):
        _, _, err = main("inspect", tmp_path / name, "--config", hf / "config.json")
        assert f"holds no state dict (its keys: {keys}); save one alone" in err


def test_export_of_another_group(tmp_path, main, models):
    """fp32 master weights beside cast weights, of a tied model."""
    from dataclasses import replace

    from lt_ckpt import ConvertOptions, convert_checkpoint, open_source
    from lt_ckpt.comparison import compare

    one = open_source(models.make(tmp_path / "a", seed=0, tie_word_embeddings=True))
    two = open_source(models.make(tmp_path / "b", seed=1, dtype="F32", tie_word_embeddings=True))

    def from_above(source):
        stored = source.weights.locations.items()
        files = {name: tuple(replace(s, file=f"{source.path.name}/{s.file}") for s in found) for name, found in stored}
        return replace(source.weights, locations=files)

    both = replace(one, root=tmp_path, groups={"weights": from_above(one), "master": from_above(two)})
    run = convert_checkpoint(both, tmp_path / "run", ConvertOptions(format="lt"))
    assert main("export", run, "--out", tmp_path / "out", "--master-weights")[0] == 0
    exported = open_source(tmp_path / "out")
    assert exported.config["torch_dtype"] == "float32"
    assert all(c.is_equal for c in compare(exported, two))
    assert main("convert", run, tmp_path / "x.pt", "--to", "pt", "--master-weights")[0] == 0
    assert all(c.is_equal for c in compare(open_source(tmp_path / "x.pt", config=tmp_path / "b"), two))
