"""What a stranger put in the place of a recipe, a compile cache or a variable: refused or shown, never raw."""

import shutil
import subprocess
from pathlib import Path

import pytest

from lt_test_helpers.hostile import (
    ANSI,
    CONTENTS,
    FEW,
    Outcome,
    assert_harmless,
    assert_refused,
    replace,
    run_command,
    unusable_paths,
)
from lt_trainer.__main__ import main
from lt_trainer.config.toml import dump

NAME = ANSI.replace("/", "")
COMMANDS: dict[str, list[str]] = {
    "env": ["env", "{bad}"],
    "precompile": ["precompile", "{bad}"],
    "hyperparameters": ["precompile", "{recipe}", "--hyperparameters", "{bad}"],
    "list": ["neuron-cache", "list", "{bad}"],
    "list of a cache": ["neuron-cache", "list", "--cache", "{bad}"],
    "list-failed": ["neuron-cache", "list-failed", "--cache", "{bad}"],
    "clean": ["neuron-cache", "clean", "--cache", "{bad}"],
}


def write_recipe(path: Path, **options: str) -> Path:
    """A recipe for Trainium."""
    fields = {
        "model.preset": "tiny-2m",
        "model.vocab_size": 320,
        "data.store": "store",
        "data.seq_len": 32,
        "batch.global_batch_size": 32,
        "batch.micro_batch_size": 1,
        "schedule.max_steps": 4,
        "schedule.warmup_steps": 1,
        "run.engine": "neuron",
        "run.dir": str(path.parent / "run"),
    }
    path.write_text(dump(fields | {f"engine.neuron.{name}": value for name, value in options.items()}))
    return path


@pytest.mark.parametrize("command", COMMANDS)
def test_every_path_of_a_command(command: str, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "recipe.toml")

    def run(bad: Path) -> Outcome:
        return run_command(main, *(word.format(bad=bad, recipe=recipe) for word in COMMANDS[command]))

    for number, (kind, make) in enumerate(FEW.items()):
        folder = tmp_path / f"{number} {NAME}"
        folder.mkdir()
        make(folder / "bad")
        if kind == "directory" and "--cache" in COMMANDS[command]:
            assert_harmless(run(folder / "bad"))  # an empty cache
        else:
            assert_refused(run(folder / "bad"))
    with unusable_paths(tmp_path) as paths:
        for path in paths.values():
            assert_refused(run(path))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["model.log", "model.neff", "model.hlo_module.pb.lock", NAME])
def test_a_cache_of_a_stranger(name: str, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for kind, make in (FEW | {"escapes": CONTENTS["escapes"]}).items():
        shutil.rmtree(cache, ignore_errors=True)
        entry = cache / f"neuronxcc-{NAME}" / "MODULE_1+2"
        entry.mkdir(parents=True)
        (entry / "compile_flags.json").write_text("[]")
        if "lock" not in name:
            (entry / "model.log").write_text(ANSI)
        replace(entry / name, make)
        for command in ("list", "list-failed", "clean"):
            outcome = run_command(main, "neuron-cache", command, "--cache", cache)
            assert_harmless(outcome)
            assert outcome.code in (0, 1, 64), (kind, outcome)


def test_a_link_to_the_folder_of_a_compiler_is_not_followed_to_what_is_removed(tmp_path: Path) -> None:
    entry = tmp_path / "elsewhere" / "MODULE_1+2"
    entry.mkdir(parents=True)
    (entry / "model.log").write_text("failed")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "neuronxcc-2").symlink_to(tmp_path / "elsewhere")
    outcome = run_command(main, "neuron-cache", "clean", "--cache", tmp_path / "cache")
    assert_refused(outcome)
    assert "symbolic link" in outcome.err
    assert (entry / "model.log").exists()


@pytest.mark.parametrize("name", ["NEURON_CC_FLAGS", "NEURON_COMPILE_CACHE_URL", "LT_NEURON_ENV", "FI_PROVIDER"])
@pytest.mark.parametrize(
    "value", [ANSI, f"--cache_dir={ANSI}", f"file://{ANSI}", f"s3://{ANSI}", "[" * 100_000, "x" * 5000]
)
def test_a_variable_of_a_stranger(name: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = write_recipe(tmp_path / "recipe.toml")
    monkeypatch.setenv(name, value)
    for words in (
        ["env", recipe],
        ["env", recipe, "--export"],
        ["env", recipe, "--json"],
        ["neuron-cache", "list", recipe],
    ):
        outcome = run_command(main, *words)
        assert_harmless(outcome)
        assert outcome.code in (0, 64), outcome


@pytest.mark.parametrize("value", [ANSI, "it's\n\\x", "--o=\u00e9 \u202e"])
def test_a_shell_gets_what_was_printed_for_it(value: str, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "recipe.toml", cc_flags=value)
    outcome = run_command(main, "env", recipe, "--export")
    assert_harmless(outcome)
    program = f'{outcome.out}\nprintf %s "$NEURON_CC_FLAGS"'
    got = subprocess.run(["bash", "-c", program], capture_output=True, check=True)
    assert got.stdout.decode() == value
