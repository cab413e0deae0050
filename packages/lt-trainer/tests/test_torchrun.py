"""What torchrun is told, and which of the ranks' exit codes counts; tests across packages run torchrun itself."""

import os
import signal
import subprocess
import sys

import pytest

from lt_trainer.__main__ import main
from lt_trainer.cli import torchrun
from lt_trainer.config.recipe import load
from lt_trainer.resilience.stop_signals import STOP_SIGNALS


def test_the_command_line() -> None:
    run = [sys.executable, "-P", "-m", "lt_trainer.cli.torchrun_process", "--nproc-per-node", "2"]
    rank = ["--no-python", sys.executable, "-P", "-u", "-m", "lt_trainer", "run", "a.toml"]
    assert torchrun.torchrun_command(2, [], ["run", "a.toml"]) == [*run, "--standalone", *rank]
    assert torchrun.torchrun_command(2, ["--nnodes", "4"], ["run", "a.toml"]) == [*run, "--nnodes", "4", *rank]


def test_torchrun_waits_as_long_as_the_recipe_says_and_forwards_all_stop_signals() -> None:
    recipe = load(base={"data": {"store": "unused"}}, overrides=["fault_tolerance.grace_period_s=99.5"]).recipe
    environ = torchrun.torchrun_environment(recipe)
    assert environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == environ["PET_SHUTDOWN_TIMEOUT"] == "100"
    names = set(environ["PET_SIGNALS_TO_HANDLE"].split(","))
    assert names == set(environ["TORCHELASTIC_SIGNALS_TO_HANDLE"].split(","))
    assert names >= {number.name for number in STOP_SIGNALS}


@pytest.mark.parametrize(
    ("of_torchrun", "of_ranks", "code"),
    [
        (0, [0, 0], 0),
        *((1, codes, max(codes)) for codes in ([75, 75], [75])),  # of [75] the other was killed, and left no code
        *((1, codes, code) for codes, code in (([75, 64], 64), ([75, 70], 70), ([70, 64], 64), ([0, 1], 1), ([], 1))),
        (137, [], 137),
        (138, [], 75),  # torchrun itself was told to stop while it loaded
        (137, [0], 137),
    ],
)
def test_one_code_for_all_ranks(of_torchrun, of_ranks, code) -> None:
    assert torchrun.combine_exit_codes(of_torchrun, of_ranks) == code


def test_a_rank_notes_its_code_only_for_us(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["lt-train", "run", str(tmp_path / "missing.toml")])
    taken = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        assert main() == 64
        assert not list(tmp_path.iterdir())
        monkeypatch.setenv("RANK", "3")
        monkeypatch.setenv(torchrun.EXIT_CODES_VARIABLE, str(tmp_path))
        assert main() == 64
        assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"3": f"64 {os.uname().nodename}\n"}
        assert torchrun.read_exit_codes(tmp_path) == {3: 64}
        (tmp_path / "4").touch()  # it is being written
        assert torchrun.read_exit_codes(tmp_path) == {3: 64}
        monkeypatch.setenv(torchrun.EXIT_CODES_VARIABLE, str(tmp_path / "gone"))
        assert main() == 64
    finally:
        for number, handler in taken.items():
            signal.signal(number, handler)
    assert "missing.toml" in capsys.readouterr().err


def test_a_rank_writes_into_its_own_file_where_the_launcher_wants_that(tmp_path) -> None:
    """Its interpreter's own words, too, behind those of an earlier rank of that number."""
    command = [sys.executable, "-m", "lt_trainer", "run", str(tmp_path / "missing.toml")]
    environ = os.environ | {"RANK": "3", torchrun.RANK_LOGS_VARIABLE: str(tmp_path)}
    for _ in range(2):
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (64, "", "")
    assert [path.name for path in tmp_path.iterdir()] == ["rank-00003.log"]
    assert (tmp_path / "rank-00003.log").read_text().count("missing.toml") == 2
    command[3] = "torchrun"  # in a pod whose controller has set RANK
    command += ["--nproc-per-node", "1"]
    assert "missing.toml" in subprocess.run(command, env=environ, capture_output=True, text=True, check=False).stderr
