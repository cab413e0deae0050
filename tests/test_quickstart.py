"""The quickstart as a person runs it, on text that a small model learns in a few steps: one passage, over and over."""

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lt_test_helpers.run_files import read_losses
from lt_trainer.run_directory.jsonl import read_jsonl

STEPS = 60


@pytest.fixture(scope="module")
def passage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents that each hold one passage of 160 words from another starting point: bigrams alone cannot follow it."""
    folder = tmp_path_factory.mktemp("passage")
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 6))) for _ in range(40)]
    text = rng.choices(words, k=160) * 4
    for i in range(120):
        start = rng.randrange(160)
        (folder / f"{i:03}.txt").write_text(" ".join(text[start : start + 220]) + "\n")
    return folder


@pytest.fixture(scope="module")
def finished_quickstart(passage: Path, lt, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A finished quickstart's folder and what it printed."""
    cwd = tmp_path_factory.mktemp("quickstart")
    text = lt("quickstart", "--source", passage, "--steps", str(STEPS), cwd=cwd)
    return cwd / "quickstart", text


def test_it_proves_what_it_promises(finished_quickstart: tuple[Path, str]) -> None:
    folder, text = finished_quickstart
    summary = json.loads((folder / "summary.json").read_text())
    losses, undisturbed = read_losses(folder / "run"), read_losses(folder / "undisturbed")
    assert list(undisturbed) == list(range(1, 11))
    assert undisturbed == {step: losses[step] for step in undisturbed}
    assert summary["equal_losses"] == 10
    assert "10 losses with a stop and a resume equal those of an undisturbed run, bit for bit" in text
    assert losses[STEPS] < losses[1] / 4, "it has learned"
    events = read_jsonl(folder / "run" / "events.jsonl")
    assert [event["event"] for event in events].count("start") == 2, "the resume is a process of its own"
    assert [(event["signal"], event["step"]) for event in events if event["event"] == "stop"] == [("SIGTERM", 5)]
    for command in ("data train-tokenizer", "data prepare", "data pack", "train run", "ckpt export", "ckpt verify"):
        assert f"$ lt {command} quickstart/" in text
    assert "\ndef " in text, "a sample"
    assert (folder / "report.html").read_text().startswith("<!doctype html>")


def test_a_resume_that_is_not_exact_is_found(finished_quickstart: tuple[Path, str], lt, tmp_path: Path) -> None:
    shutil.copytree(finished_quickstart[0], tmp_path / "quickstart")
    metrics = tmp_path / "quickstart" / "undisturbed" / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    rows[-1]["loss"] *= 1 + 1e-15
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = json.loads((tmp_path / "quickstart" / ".lt-quickstart").read_text())
    text = lt("quickstart", "--source", settings["source"], "--steps", str(STEPS), cwd=tmp_path, code=64)
    assert "step 10: the loss after a resume is not that of an undisturbed run" in text


def test_an_eager_run_imports_no_compiler(finished_quickstart: tuple[Path, str], tmp_path: Path) -> None:
    """It takes as long to import as all of torch."""
    code = "import sys; from lt_trainer.__main__ import main; assert not main(sys.argv[1:]); print(*sys.modules)"
    words = ["run", "quickstart/run.toml", "--set", f"run.dir={tmp_path / 'run'}", "--set", "schedule.max_steps=6"]
    folder = finished_quickstart[0].parent
    done = subprocess.run([sys.executable, "-c", code, *words], check=True, stdout=-1, text=True, cwd=folder)
    assert not {"torch._dynamo", "sympy"} & set(done.stdout.splitlines()[-1].split())


def test_transformers_computes_the_logits_of_the_checkpoint(finished_quickstart: tuple[Path, str]) -> None:
    """In float32 on the CPU; swapped heads or wrong rotary angles exceed the tolerance by far."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from lt_trainer.evaluation.local_model import load_model

    folder, _ = finished_quickstart
    ours = load_model(folder / "run")
    theirs = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    text = json.loads((folder / "corpus" / "validation.jsonl").read_text().splitlines()[0])["text"]
    ids = torch.from_numpy(ours.tokenizer.encode_batch([text])[0].astype("int64"))[None, :128]
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    assert tokenizer(text, add_special_tokens=False)["input_ids"][:128] == ids[0].tolist()
    with torch.no_grad():
        expected, exported = ours.model(ids), theirs(input_ids=ids).logits
    assert float((expected - exported).abs().max()) <= 1e-4 * float(expected.abs().max())


def test_its_run_is_released_and_repeated_from_the_release_alone(
    finished_quickstart: tuple[Path, str], lt, tmp_path: Path
) -> None:
    """Made beside the quickstart, moved to another folder, verified there, and its first steps repeated there."""
    folder, _ = finished_quickstart
    (tmp_path / "licences.toml").write_text(
        """
[release]
name = "quickstart"
producer = "Example Lab"

[licenses]
data = "CDLA-Permissive-2.0"
document = "CC-BY-4.0"

[[sources]]
path = "corpus/*.jsonl"
license = "CC0-1.0"
redistribute = true
"""
    )
    lt(
        *("release", "make", "quickstart/run", "--out", tmp_path / "made"),
        *("--licenses", tmp_path / "licences.toml", "--mof-class", "2"),
        cwd=folder.parent,
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.move(tmp_path / "made", elsewhere / "release")
    assert "verified" in lt("release", "verify", "release", cwd=elsewhere)
    text = lt("release", "reproduce", "release", "--steps", "3", "--python", sys.executable, cwd=elsewhere)
    assert "losses of 3 steps: bit-equal" in text


def test_run_again_it_goes_on_with_what_is_there(finished_quickstart: tuple[Path, str], passage: Path, lt) -> None:
    folder, _ = finished_quickstart
    before = (folder / "run" / "metrics.jsonl").read_bytes()
    text = lt("quickstart", "--source", passage, "--steps", str(STEPS), cwd=folder.parent)
    assert "continuing it" in text
    assert (folder / "run" / "metrics.jsonl").read_bytes() == before


def test_other_settings_need_to_be_told_to_start_over(finished_quickstart: tuple[Path, str], passage: Path, lt) -> None:
    folder, _ = finished_quickstart
    text = lt("quickstart", "--source", passage, "--steps", "70", cwd=folder.parent, code=64)
    assert f"'steps': {STEPS}}}, not " in text
    assert "--overwrite" in text
    assert (folder / "summary.json").exists()
