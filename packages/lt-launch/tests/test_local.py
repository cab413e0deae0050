"""`lt launch run --on local` as a person and a scheduler meet it: ends, kills, restarts, pipelines, cancellation."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from lt_launch.__main__ import main
from lt_launch.attempt import Stop
from lt_launch.hosts import LocalTarget
from lt_launch.launch_dir import create
from lt_launch.node import Host
from lt_launch.profile import Profile
from lt_launch.run_file import RunOverrides, read_run_file
from lt_launch.stage_runner import StageRunner

TRAINER = Path(__file__).with_name("fake_trainer.py")
COMMAND = [sys.executable, "-m", "lt_launch", "launch"]
Capture = pytest.CaptureFixture[str]


class Lt:
    """The `lt` command in a folder, and what it started."""

    def __init__(self, folder: Path, capture: Capture) -> None:
        self.folder, self.capture = folder, capture
        self.started: list[subprocess.Popen[str]] = []

    def run(self, *arguments: str, code: int = 0) -> str:
        """Run a command in this process; both streams, after checking its exit code."""
        found = main(["launch", *arguments])
        out, err = self.capture.readouterr()
        assert found == code, out + err
        return out + err

    def start(self, *arguments: str, before: tuple[str, ...] = ()) -> "subprocess.Popen[str]":
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.started.append(subprocess.Popen([*before, *COMMAND, *arguments], cwd=self.folder, **output))
        return self.started[-1]

    def write(self, text: str) -> None:
        (self.folder / "run.toml").write_text(text)

    def trainer(self, steps: int, pause: float = 0.0, *, grace_s: float = 20, env: str = "") -> None:
        """A run file with two ranks of the fake trainer, whose run directory is also the launch's folder."""
        argv = json.dumps([sys.executable, "-S", "-E", str(TRAINER), "runs/x", str(steps), str(pause)])
        self.write(
            f'[job]\nname = "x"\nargv = {argv}\nprocs_per_node = 2\ncompletion = "run_dir"\nrun_dir = "runs/x"\n'
            f"grace_period_s = {grace_s:.1f}\n[job.env]\n{env}\n"
        )

    def kinds(self, run: str = "x", stage: str = "x") -> list[str]:
        """How the attempts of a stage ended."""
        files = sorted((self.folder / f"runs/{run}/launch/stages/{stage}").glob("attempt-*/exit.json"))
        return [json.loads(file.read_text())["kind"] for file in files]

    def states(self, run: str) -> dict[str, str]:
        return {row["stage"]: row["state"] for row in json.loads(self.run("status", run, "--json"))}

    def pids(self, word: str = "fake_trainer.py") -> list[int]:
        """Processes that run here with a word in their command line, in the order of their start."""
        found = [one for one in psutil.process_iter(["cwd", "cmdline"]) if one.info["cwd"] == str(self.folder)]
        return [one.pid for one in found if any(word in text for text in one.info["cmdline"] or ())]

    def until(self, what: Callable[[], object]) -> None:
        deadline = time.monotonic() + 30
        while not what():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def saved(self, step: int) -> None:
        """Wait for a checkpoint."""
        self.until((self.folder / f"runs/x/checkpoints/step-{step:08}/COMMIT").exists)


@pytest.fixture
def lt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> Iterator[Lt]:
    monkeypatch.chdir(tmp_path)
    made = Lt(tmp_path, capsys)
    yield made
    for process in made.started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_a_run_to_its_end_keeps_what_was_rendered_and_no_secret(lt: Lt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_PRIVATE_KEY", "hush-hush")
    lt.trainer(3, env='GREETING = "hello"')
    lt.run("render", "run.toml", "--output-dir", "rendered")
    shown = lt.run("run", "run.toml")
    assert f"# folder: {lt.folder}/runs/x; elsewhere: lt launch status x\n" in shown
    assert "rank 0 of 2 goes on from step 0" in shown
    kept = lt.folder / "runs/x/launch"
    assert kept.stat().st_mode & 0o777 == 0o700
    spec = (kept / "rendered/x.spec.json").read_text()
    assert spec == (lt.folder / "rendered/x.spec.json").read_text() == (kept / "stages/x/spec.json").read_text()
    assert json.loads(spec)["env"] == {"GREETING": "hello"}
    assert all(b"hush" not in path.read_bytes() for path in kept.rglob("*") if path.is_file())
    assert (lt.folder / "runs/x/.lt-run").exists(), "lt-trainer takes the folder as its own"
    assert "completed already, skipped" in lt.run("run", "run.toml")
    assert lt.kinds() == ["done"]


def test_a_killed_rank_is_named_and_the_run_goes_on_from_its_checkpoint(lt: Lt) -> None:
    lt.trainer(6, 0.05, env='FAULT = "1:4:-9"')
    shown = lt.run("run", "run.toml")
    assert f"rank 1 on {os.uname().nodename} was the first to fail: killed by SIGKILL" in shown
    assert "attempt 0 was ended as killed; 1 of 10 restarts are used" in shown
    assert lt.kinds() == ["killed", "done"]
    first, second = (line for line in shown.splitlines() if line.startswith("rank 0 of 2 goes on"))
    assert first.endswith("step 0")
    assert not second.endswith("step 0")


@pytest.mark.parametrize("code", [64, 3])
def test_what_would_only_happen_again_is_not_started_again(lt: Lt, code: int) -> None:
    lt.trainer(9, env=f'FAULT = "1:2:{code}"')
    shown = lt.run("run", "run.toml", code=code)
    assert f"was the first to fail: exit code {code}" in shown
    assert f"    rank 1: planted {code}" in shown
    assert lt.kinds() == ["failed"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_is_a_saved_stop_with_75(lt: Lt, number: signal.Signals) -> None:
    lt.trainer(1000, 0.05)
    process = lt.start("run", "run.toml")
    lt.saved(2)
    process.send_signal(number)
    process.send_signal(signal.SIGTERM)  # a second one changes nothing
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 75, out
    assert "stopped as requested" in out
    assert "rank 0 stopped" in out
    assert lt.kinds() == ["stopped"]
    assert lt.states("x") == {"x": "requeued"}
    assert not lt.pids()


def test_nothing_is_left_when_the_launcher_is_killed(lt: Lt) -> None:
    """One rank does not even listen to SIGTERM: it is killed when the grace time is over. The other saves."""
    lt.trainer(1000, 0.05, env='FAULT = "1:2:hang"', grace_s=1)
    process = lt.start("run", "run.toml")
    log = lt.folder / "runs/x/launch/stages/x/attempt-000/rank-00001.log"
    lt.until(lambda: log.exists() and "planted hang" in log.read_text())
    assert len(lt.pids()) == 2
    process.kill()
    lt.until(lambda: not lt.pids())
    assert "rank 0 stopped" in log.with_name("rank-00000.log").read_text()
    assert "the process that ran it is gone" in lt.run("status", "x")


def test_a_reader_that_goes_away_does_not_end_the_run(lt: Lt) -> None:
    lt.trainer(40, 0.05)
    process = lt.start("run", "run.toml")
    assert process.stdout is not None
    assert process.stdout.readline().startswith("# folder: ")
    assert process.stdout.readline().startswith("rank 0 of 2")
    process.stdout.close()
    os.kill(lt.pids()[-1], signal.SIGKILL)  # so that there is something to say
    assert process.wait(120) == 0
    assert lt.kinds() == ["killed", "done"]


def test_status_logs_and_cancel_from_elsewhere(lt: Lt) -> None:
    """With nohup, so that the end of the terminal is none of the run."""
    lt.trainer(1000, 0.05)
    process = lt.start("run", "run.toml", before=("nohup",))
    lt.saved(1)
    process.send_signal(signal.SIGHUP)
    lt.saved(5)
    assert f"{lt.folder}/runs/x is being launched by process {process.pid}" in lt.run("run", "run.toml", code=64)
    row = json.loads(lt.run("status", "x", "--json"))[0]
    assert (row["state"], row["attempt"], row["exit_code"], row["nodes"]) == ("running", 0, None, [os.uname().nodename])
    assert lt.run("logs", "runs/x") == "rank 0 of 2 goes on from step 0\n"
    assert lt.run("logs", "runs/x", "--rank", "1") == "rank 1 of 2 goes on from step 0\n"
    assert "--rank 2: stage x has ranks 0 to 1" in lt.run("logs", "x", "--rank", "2", code=64)
    follower = lt.start("logs", "x", "-f")
    assert "training saves and exits" in lt.run("cancel", "x")
    assert follower.communicate(timeout=120)[0] == "rank 0 of 2 goes on from step 0\nrank 0 stopped\n"
    assert process.wait(60) == 75
    assert lt.states("x") == {"x": "cancelled"}
    assert "it is not running" in lt.run("cancel", "x")


PIPELINE = """
[pipeline]
out = "runs/wiki"
[[stages]]
name = "download"
argv = ["bash", "-c", "echo ran >> download.log; echo text > text.txt"]
outputs = ["text.txt"]
[[stages]]
name = "prepare"
after = ["download"]
array = 3
argv = ["bash", "-c", "echo ran >> prepare.$LT_ARRAY_INDEX.log; cat text.txt > part.$0", "{index}"]
inputs = ["text.txt"]
[[stages]]
name = "convert"
argv = ["bash", "-c", "echo ran >> convert.log; test -e allowed && cat part.0 part.1 part.2 > whole"]
after = ["prepare"]
inputs = ["part.0", "part.1", "part.2"]
outputs = ["whole"]
[[stages]]
name = "export"
after = ["convert"]
argv = ["bash", "-c", "echo ran >> export.log; cp whole exported"]
inputs = ["whole"]
outputs = ["exported"]
[[stages]]
name = "other"
argv = ["true"]
"""


def test_a_pipeline_stops_at_a_failure_goes_on_there_and_skips_what_is_done_by_content(lt: Lt) -> None:
    def ran() -> dict[str, int]:
        return {path.stem: len(path.read_text().split()) for path in sorted(lt.folder.glob("*.log"))}

    lt.write(PIPELINE)
    shown = lt.run("run", "run.toml", code=1)
    assert "convert: failed: rank 0" in shown
    assert "export: not started, because convert did not succeed" in shown
    once = {"download": 1, "prepare.0": 1, "prepare.1": 1, "prepare.2": 1}
    assert ran() == once | {"convert": 1}
    completed = ("download", "prepare.0", "prepare.1", "prepare.2", "other")
    assert lt.states("wiki") == dict.fromkeys(completed, "completed") | {"convert": "failed", "export": "pending"}
    (lt.folder / "allowed").touch()
    for _ in range(2):
        lt.run("run", "run.toml")
        assert ran() == once | {"convert": 2, "export": 1}
    assert (lt.folder / "exported").read_text() == "text\n" * 3
    (lt.folder / "part.1").write_text("mended\n")  # an input of convert changes: it and what comes after it run again
    lt.run("run", "run.toml")
    assert ran() == once | {"convert": 3, "export": 2}
    assert (lt.folder / "exported").read_text() == "text\nmended\ntext\n"
    (lt.folder / "exported").unlink()
    lt.run("run", "run.toml", "--stage", "export")
    assert ran() == once | {"convert": 3, "export": 3}


def test_elements_run_side_by_side_as_far_as_there_is_room(lt: Lt) -> None:
    """Each of two ends only when the other has begun; those that use the devices never meet."""
    meet = "touch at.$LT_ARRAY_INDEX; until [ -e at.0 -a -e at.1 ]; do sleep 0.01; done; echo here"
    alone = "mkdir running && sleep 0.2 && rmdir running"
    lt.write(
        f'[[stages]]\nname = "p"\narray = 2\nargv = ["bash", "-c", "{meet}"]\n'
        f'[[stages]]\nname = "q"\narray = 2\nargv = ["bash", "-c", "{alone}"]\nresources = {{ gpus_per_node = 1 }}\n'
        f'[[stages]]\nname = "r"\narray = 2\nargv = ["bash", "-c", "{alone}"]\narray_limit = 1\n'
        "[profile.local]\nslots = 2\n"
    )
    shown = lt.run("run", "run.toml")
    assert "[p.0] here" in shown
    assert "[p.1] here" in shown


def test_a_relative_working_folder_is_one_of_the_launchers(lt: Lt) -> None:
    (lt.folder / "work").mkdir()
    lt.write('[job]\nargv = ["touch", "here"]\ncwd = "work"\noutputs = ["here"]\n')
    lt.run("run", "run.toml")
    assert (lt.folder / "work/here").exists()


def test_after_the_loss_of_a_host_an_element_waits_for_a_slot_of_another(lt: Lt) -> None:
    """Host a dies under element 0, whose next attempt must not join element 1 on the devices of host b."""
    own = "mkdir running && sleep 4 && rmdir running"
    lt.write(
        '[[stages]]\nname = "p"\narray = 3\nresources = { gpus_per_node = 1 }\n'
        f'argv = ["bash", "-c", "if mkdir first.$LT_ARRAY_INDEX && [ $LT_ARRAY_INDEX = 0 ]; then sleep 9; fi; {own}"]\n'
    )
    file = read_run_file("run.toml", Profile(), RunOverrides())
    target = LocalTarget()
    rendered = target.render(file.pipeline, file.profile)
    made = create(file.pipeline, file.profile, "local", rendered, target.stage_specs(file.pipeline, file.profile))
    dying = ("timeout", "-s", "KILL", "1", "bash", "-s")
    hosts = [Host(name="a", slots=1, shell=dying), Host(name="b", slots=1)]
    assert StageRunner(made, hosts, Stop(), 1).run() == 0
    assert [lt.kinds("run", f"p.{index}") for index in range(3)] == [["lost", "done"], ["done"], ["done"]]
    folders = lt.folder.glob("runs/run/launch/stages/p.*/attempt-001/hosts")
    assert [path.read_text() for path in folders] == ["b\n"]


def test_a_stop_ends_all_that_runs_and_begins_nothing_more(lt: Lt) -> None:
    wait = "touch at.$LT_ARRAY_INDEX; while :; do sleep 0.01; done"
    lt.write(
        f'[pipeline]\nout = "runs/p"\n[[stages]]\nname = "p"\narray = 3\nargv = ["bash", "-c", "{wait}"]\n'
        '[[stages]]\nname = "q"\nargv = ["touch", "q"]\n[profile.local]\nslots = 2\n'
    )
    process = lt.start("run", "run.toml")
    lt.until(lambda: (lt.folder / "at.0").exists() and (lt.folder / "at.1").exists())
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 75, out
    assert [lt.kinds("p", f"p.{index}") for index in range(3)] == [["stopped"], ["stopped"], []]
    assert not (lt.folder / "at.2").exists()
    assert not (lt.folder / "q").exists()
    assert not lt.pids("sleep 0.01")


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ('[job]\nargv = ["true"]\nnodes = 2\n', 64, "job.nodes = 2: stage run cannot run on local"),
        ('[job]\nargv = ["true"]\ncontainer.image = "x"\n', 64, 'job.container.image = "x"'),
        ('[job]\nargv = ["true"]\npass_env = ["MY_OWN_TOKEN"]\n', 64, "export MY_OWN_TOKEN, or leave it out"),
        ('[job]\nargv = ["true"]\noutputs = ["gone.txt"]\n', 70, "did not make gone.txt"),
    ],
)
def test_what_cannot_be_done_is_told_before_anything_is_written(lt: Lt, text: str, code: int, says: str) -> None:
    lt.write(text)
    assert says in lt.run("run", "run.toml", code=code)
    assert (lt.folder / "runs").exists() == (code == 70)


def test_of_the_sources_of_a_variable_the_first_wins(lt: Lt, monkeypatch: pytest.MonkeyPatch) -> None:
    """--env, then [job.env], then the profile's [env], then the machine's own; A is in all, D in the last alone."""
    for name in "ABCD":
        monkeypatch.setenv(name, "machine")
    lt.write(
        '[job]\nargv = ["bash", "-c", "echo $A $B $C $D >found"]\nenv = { A = "job", B = "job" }\n'
        '[profile.env]\nA = "profile"\nB = "profile"\nC = "profile"\n'
    )
    lt.run("run", "run.toml", "--env", "A=flag")
    assert (lt.folder / "found").read_text().split() == ["flag", "job", "profile", "machine"]
