"""What torchrun is told, and which of the ranks' exit codes counts; tests across packages run torchrun itself."""

import os
import subprocess
import sys

import pytest

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
        (1, [75], 75),  # the other was killed, and left no code
        *((1, codes, code) for codes, code in (([75, 64], 64), ([75, 70], 70), ([70, 64], 64), ([0, 1], 1), ([], 1))),
        (137, [], 137),
        (138, [], 75),  # torchrun itself was told to stop while it loaded
        (137, [0], 137),
    ],
)
def test_one_code_for_all_ranks(of_torchrun, of_ranks, code) -> None:
    assert torchrun.combine_exit_codes(of_torchrun, of_ranks) == code


def test_a_rank_notes_its_code_and_writes_into_its_own_file_where_the_launcher_wants_that(tmp_path) -> None:
    """Its interpreter's own words, too, behind those of an earlier rank of that number."""
    codes, logs = tmp_path / "codes", tmp_path / "logs"
    codes.mkdir()
    logs.mkdir()
    command = [sys.executable, "-m", "lt_trainer", "run", str(tmp_path / "missing.toml")]
    variables = {torchrun.EXIT_CODES_VARIABLE: str(codes), torchrun.RANK_LOGS_VARIABLE: str(logs)}
    for rank in ({}, {"RANK": "3"}, {"RANK": "3"}):
        done = subprocess.run(command, env=os.environ | variables | rank, capture_output=True, text=True, check=False)
        assert done.returncode == 64
        assert ("missing.toml" in done.stderr) == (not rank)
        assert {path.name: path.read_text() for path in codes.iterdir()} == (
            {"3": f"64 {os.uname().nodename}\n"} if rank else {}
        )
    assert [path.name for path in logs.iterdir()] == ["rank-00003.log"]
    assert (logs / "rank-00003.log").read_text().count("missing.toml") == 2
    (codes / "4").touch()  # it is being written
    assert torchrun.read_exit_codes(codes) == {3: 64}
    command[3] = "torchrun"  # in a pod whose controller has set RANK
    command += ["--nproc-per-node", "1"]
    environ = os.environ | variables | {"RANK": "3"}
    assert "missing.toml" in subprocess.run(command, env=environ, capture_output=True, text=True, check=False).stderr
