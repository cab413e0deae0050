"""What a stranger put in the place of a file: every command refuses it at once, in a line that changes no terminal.

`test_hostile.py` changes the contents of every format; this file gives each command that takes a path each thing of
`lt_test_helpers.hostile`, also in a folder whose files and tensors have names of escapes.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from lt_ckpt.__main__ import main
from lt_test_helpers.hostile import (
    ANSI,
    CONTENTS,
    FEW,
    PLACES,
    assert_harmless,
    assert_refused,
    make_fifo,
    replace,
    run_command,
    unusable_paths,
)

COMMANDS: dict[str, list[str]] = {
    "inspect": ["inspect", "{bad}"],
    "inspect json": ["inspect", "{bad}", "--tensors", "--json"],
    "verify": ["verify", "{bad}"],
    "verify against": ["verify", "{good}", "--against", "{bad}"],
    "diff": ["diff", "{good}", "{bad}"],
    "export": ["export", "{bad}", "--out", "{out}"],
    "convert": ["convert", "{bad}", "{out}", "--to", "pt"],
    "config": ["inspect", "{zero}", "--config", "{bad}"],
    "reshard": ["reshard-optimizer", "{bad}", "{out}", "--dp", "2", "--config", "{config}"],
    "reshard config": ["reshard-optimizer", "{zero}", "{out}", "--dp", "2", "--config", "{bad}"],
    "upload": ["upload", "{bad}", "s3://bucket/prefix"],
    "prune": ["prune", "{bad}", "--keep-last", "1"],
    "export out": ["export", "{good}", "--out", "{bad}"],
    "convert out": ["convert", "{good}", "{bad}", "--to", "pt"],
}
HARMLESS = {
    "export out": ("directory",),
    "prune": ("directory", "empty folder"),
    "convert out": (),
}
"""What is no mistake there: an empty folder to write into, or with nothing to remove."""
ZERO = Path(__file__).parent / "data" / "nxd" / "llama2-mha-tp2-dp2-zero1"


@pytest.fixture
def good(tmp_path: Path, models) -> Path:
    """A Hugging Face folder."""
    return models.make(tmp_path / "good", n_layers=1)


def fill(text: str, **places: Path) -> str:
    return text.format(**places)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_path_of_a_command(command: str, good: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in good.iterdir()}
    kinds = PLACES | CONTENTS if command in ("config", "convert") else FEW
    for number, (kind, make) in enumerate(kinds.items()):
        folder = tmp_path / f"{number} {ANSI.replace('/', '')}"
        folder.mkdir()
        make(folder / "bad")
        places = {
            "bad": folder / "bad",
            "good": good,
            "out": tmp_path / "out",
            "zero": ZERO / "nxd-plain",
            "config": ZERO / "hf-start" / "config.json",
        }
        outcome = run_command(main, *(fill(word, **places) for word in COMMANDS[command]))
        if kind in HARMLESS.get(command, ()):
            assert_harmless(outcome)
            continue
        try:
            assert_refused(outcome)
        except AssertionError as exc:
            raise AssertionError(f"{command} with {kind}") from exc
        assert not (tmp_path / "out").exists()
    assert {path: path.read_bytes() for path in good.iterdir()} == before


@pytest.mark.parametrize("command", COMMANDS)
def test_a_path_that_may_not_be_looked_at(command: str, good: Path, tmp_path: Path) -> None:
    places = {"good": good, "out": tmp_path / "out", "zero": ZERO / "nxd-plain"}
    places["config"] = ZERO / "hf-start" / "config.json"
    with unusable_paths(tmp_path) as paths:
        for bad in paths.values():
            assert_refused(run_command(main, *(fill(word, bad=bad, **places) for word in COMMANDS[command])))


def test_a_file_of_a_model_of_another_kind(good: Path, tmp_path: Path) -> None:
    """Each file of a Hugging Face folder, and those beside it, in every command that reads the folder."""
    (good / "tokenizer.json").write_text('{"added_tokens": [], "model": {"vocab": {"a": 2}}}')
    (good / "generation_config.json").write_text("{}")
    for name in ("config.json", "model.safetensors", "tokenizer.json", "generation_config.json", "SHA256SUMS"):
        for kind, make in (PLACES | CONTENTS if name == "config.json" else FEW).items():
            model = tmp_path / "model"
            shutil.copytree(good, model)
            replace(model / name, make)
            for words in (["inspect", model], ["convert", model, tmp_path / "out", "--to", "hf"]):
                outcome = run_command(main, *words)
                assert_harmless(outcome)
                assert outcome.code in (0, 64), (name, kind, words, outcome)
                if kind in ("fifo", "socket", "link to a device") and words[0] == "convert":
                    assert outcome.code == 64 or not (tmp_path / "out" / name).exists(), (name, kind)
                shutil.rmtree(tmp_path / "out", ignore_errors=True)
            shutil.rmtree(model)


def test_names_of_tensors_and_values_are_escaped(good: Path, tmp_path: Path) -> None:
    folder = tmp_path / ANSI.replace("/", "")
    shutil.copytree(good, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {ANSI: ANSI}))
    save_file({ANSI: np.zeros(3, np.float32)}, folder / "model.safetensors", {ANSI: ANSI, "format": "pt"})
    (folder / f"{ANSI.replace('/', '')}.txt").write_text(ANSI)
    for words in (
        ["inspect", folder, "--tensors"],
        ["inspect", folder, "--tensors", "--json"],
        ["verify", folder],
        ["diff", good, folder],
        ["diff", folder, good],
        ["export", folder, "--out", tmp_path / "out"],
        ["upload", folder, f"hf://org/{ANSI}", "--dry-run"],
        ["upload", folder, f"s3://{ANSI}/x", "--dry-run"],
        ["download", f"s3://bucket/{ANSI}", folder],
    ):
        assert_refused(run_command(main, *words), codes=(0, 1, 64))


def test_a_pipe_below_a_folder_to_upload(good: Path) -> None:
    make_fifo(good / "more.bin")
    for address in ("s3://bucket/prefix", "hf://org/name"):
        assert_refused(run_command(main, "upload", good, address, "--dry-run"))
