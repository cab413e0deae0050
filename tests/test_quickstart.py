"""The quickstart as a person runs it, on text that a small model learns in a few steps: one passage, over and over."""

import json
import random
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from lt_trainer.run_directory.jsonl import read_jsonl

STEPS = 60


def read_losses(run: Path) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in read_jsonl(run / "metrics.jsonl") if "loss" in r}


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
    shadow = read_jsonl(folder / "run" / "resume_check.jsonl")
    assert [r["step"] for r in shadow] == list(range(STEPS // 2 + 1, STEPS // 2 + 11))
    assert [r["loss"] for r in shadow] == [read_losses(folder / "run")[r["step"]] for r in shadow]
    assert summary["resume"]["is_equal"] is True
    assert summary["logits"]["max_difference"] <= 1e-4 * summary["logits"]["scale"]
    scores = {
        s["name"]: s["nats_per_token"] for s in [summary["comparison"]["model"], *summary["comparison"]["baselines"]]
    }
    assert scores["model"] < scores["bigram, seen tokens"] < scores["unigram, seen tokens"]
    assert "equal" in text
    assert "DIFFERENT" not in text
    events = [r["event"] for r in read_jsonl(folder / "run" / "events.jsonl")]
    assert events.count("start") == 2, "the resume is a process of its own"
    assert [r["signal"] for r in read_jsonl(folder / "run" / "events.jsonl") if r["event"] == "stop"] == ["SIGTERM"]
    assert len(list((folder / "model").glob("model-*.safetensors"))) >= 2, "sharded, with an index"


def test_it_ends_with_a_page_about_the_run(finished_quickstart: tuple[Path, str]) -> None:
    folder, text = finished_quickstart
    assert f"to open in a browser: {Path('quickstart') / 'report.html'}" in text
    page = (folder / "report.html").read_text()
    for shown in (f"completed, step {STEPS} of {STEPS}", "Loss, nats per token", "bfd-256", "embed_tokens", "resume"):
        assert shown in page, shown


def test_baselines_are_counted_on_exactly_the_rows_that_were_trained_on(finished_quickstart: tuple[Path, str]) -> None:
    """From the metrics alone: labels counted by the engine, step by step, against what the baselines have counted."""
    folder, _ = finished_quickstart
    trained = sum(r["valid_tokens"] for r in read_jsonl(folder / "run" / "metrics.jsonl") if "loss" in r)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["comparison"]["seen_tokens"] == trained


@pytest.mark.slow
def test_the_commands_by_hand_give_the_same_run(finished_quickstart: tuple[Path, str], lt, tmp_path: Path) -> None:
    folder, text = finished_quickstart
    commands = [line.strip() for line in text.splitlines() if line.startswith("  lt ")]
    assert len(commands) == 13
    hand = tmp_path / "quickstart"
    shutil.copytree(folder / "corpus", hand / "corpus")
    shutil.copy(folder / "run.toml", hand / "run.toml")
    for command in commands:
        lt(*shlex.split(command)[1:], cwd=tmp_path)
    assert read_losses(hand / "run") == read_losses(folder / "run")
    assert (hand / "report.html").exists()
    assert (hand / "model" / "config.json").read_bytes() == (folder / "model" / "config.json").read_bytes()


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
    assert f"steps was {STEPS}, is 70" in text
    assert "--overwrite" in text
    assert (folder / "summary.json").exists()
