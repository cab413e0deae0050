"""`lt launch run --on local` as a person and a scheduler meet it: ends, kills, restarts, pipelines, background."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

TRAINER = Path(__file__).with_name("fake_trainer.py")
PYTHON = [sys.executable, "-S", "-E"]


class Lt:
    """The `lt` command in a folder, and what it started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []

    def run(self, *arguments: str, code: int = 0, env: dict[str, str] | None = None) -> str:
        """Run a command to its end; both streams, after checking its exit code."""
        done = subprocess.run(
            [sys.executable, "-m", "lt_launch", "launch", *arguments],
            cwd=self.folder,
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-m", "lt_launch", "launch", *arguments],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.started.append(process)
        return process

    def write(self, text: str) -> None:
        (self.folder / "run.toml").write_text(text)

    def trainer(
        self,
        steps: int,
        pause: float = 0.0,
        *,
        procs: int = 2,
        grace_period_s: float = 20,
        more: str = "",
        env: str = "",
    ) -> None:
        """A run file with the fake trainer, whose run directory is also the launch's folder."""
        argv = json.dumps([*PYTHON, str(TRAINER), "runs/x", str(steps), str(pause)])
        self.write(
            f'[job]\nname = "x"\nargv = {argv}\nprocs_per_node = {procs}\ncompletion = "run_dir"\nrun_dir = "runs/x"\n'
            f"grace_period_s = {grace_period_s:.1f}\n{more}\n[job.env]\n{env}\n"
        )

    def events(self, run: str = "x") -> list[dict[str, Any]]:
        path = self.folder / "runs" / run / "launch" / "events.jsonl"
        return [json.loads(row) for row in path.read_text().splitlines()]

    def attempts(self, run: str = "x") -> list[tuple[str, int]]:
        return [(event["kind"], event["step"]) for event in self.events(run) if event["event"] == "attempt_ended"]

    def pids(self, word: str = "fake_trainer.py") -> dict[int, int]:
        """Processes by rank that run here with a word in their command line."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_bytes()
                environ = dict(
                    row.split(b"=", 1) for row in (folder / "environ").read_bytes().split(b"\0") if b"=" in row
                )
                if word.encode() in words and b"RANK" in environ and (folder / "cwd").resolve() == self.folder:
                    found[int(environ[b"RANK"])] = int(folder.name)
            except OSError:
                continue
        return found

    def until(self, what: Callable[[], object]) -> None:
        deadline = time.monotonic() + 60
        while not what():
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.fixture
def lt(tmp_path: Path) -> Iterator[Lt]:
    made = Lt(tmp_path)
    yield made
    for process in made.started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def test_a_run_to_its_end_keeps_what_a_person_may_want_to_know_later(lt: Lt) -> None:
    lt.trainer(3, env='GREETING = "hello"')
    shown = lt.run("run", "run.toml", env={"MY_PRIVATE_KEY": "hush-hush"})
    assert f"# folder: {lt.folder}/runs/x; elsewhere: lt launch status x\n" in shown
    assert "rank 0 of 2 goes on from step 0" in shown
    assert lt.attempts() == [("done", 3)]
    kept = lt.folder / "runs" / "x" / "launch"
    assert json.loads((kept / "rendered" / "x.spec.json").read_text())["env"] == {"GREETING": "hello"}
    assert json.loads((kept / "launch.json").read_text())["target"] == "local"
    assert all(b"hush" not in path.read_bytes() for path in kept.rglob("*") if path.is_file())
    assert (lt.folder / "runs" / "x" / ".lt-run").exists()  # lt-trainer takes the folder as its own
    assert "completed already, skipped" in lt.run("run", "run.toml")
    assert lt.attempts() == [("done", 3)]


def test_a_killed_rank_is_named_and_the_run_goes_on_from_its_checkpoint(lt: Lt) -> None:
    lt.trainer(6, 0.05, env='FAULT = "1:4:-9"')
    shown = lt.run("run", "run.toml")
    assert f"rank 1 on {os.uname().nodename} was the first to fail: killed by SIGKILL" in shown
    assert "attempt 0 was ended as killed; 1 of 10 restarts are used" in shown
    kinds = [kind for kind, _ in lt.attempts()]
    assert kinds == ["killed", "done"]
    resumed = [line for line in shown.splitlines() if line.startswith("rank 0 of 2 goes on")]
    assert resumed[0].endswith("step 0")
    assert not resumed[1].endswith("step 0")


@pytest.mark.parametrize(("what", "code"), [("64", 64), ("70", 70), ("3", 3)])
def test_what_would_only_happen_again_is_not_started_again(lt: Lt, what: str, code: int) -> None:
    lt.trainer(9, env=f'FAULT = "1:2:{what}"')
    shown = lt.run("run", "run.toml", code=code)
    assert f"was the first to fail: exit code {code}" in shown
    assert f"    rank 1: planted {what}" in shown
    assert len(lt.attempts()) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_is_a_saved_stop_with_75(lt: Lt, number: signal.Signals) -> None:
    lt.trainer(1000, 0.05)
    process = lt.start("run", "run.toml")
    lt.until(lambda: (lt.folder / "runs" / "x" / "checkpoints" / "step-00000002" / "COMMIT").exists())
    process.send_signal(number)
    process.send_signal(signal.SIGTERM)  # a second one changes nothing
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 75, out
    assert lt.attempts()[0][0] == "stopped"
    assert "stopped as requested" in out
    assert "rank 0 stopped" in out
    assert not lt.pids()


@on_linux
def test_nothing_is_left_when_the_launcher_is_killed(lt: Lt) -> None:
    """One rank does not even listen to SIGTERM: it is killed when the grace time is over. The other saves."""
    lt.trainer(1000, 0.05, env='FAULT = "1:2:hang"', grace_period_s=2)
    process = lt.start("run", "run.toml")
    log = lt.folder / "runs/x/launch/stages/x/attempt-000/rank-00001.log"
    lt.until(lambda: log.exists() and "planted hang" in log.read_text())
    assert len(lt.pids()) == 2
    process.kill()
    start = time.monotonic()
    while lt.pids():
        assert time.monotonic() - start < 2 + 10
        time.sleep(0.05)
    assert "rank 0 stopped" in log.with_name("rank-00000.log").read_text()
    assert "the process that ran it is gone" in lt.run("status", "x")


def test_a_reader_that_goes_away_does_not_end_the_run(lt: Lt) -> None:
    lt.trainer(60, 0.05)
    process = lt.start("run", "run.toml")
    assert process.stdout is not None
    assert process.stdout.readline().startswith("# folder: ")
    assert process.stdout.readline().startswith("rank 0 of 2")
    process.stdout.close()
    os.kill(lt.pids()[1], signal.SIGKILL)  # so that there is something to say
    assert process.wait(120) == 0
    assert [kind for kind, _ in lt.attempts()] == ["killed", "done"]


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
argv = ["bash", "-c", "echo ran >> prepare.$LT_ARRAY_INDEX.log; cat text.txt > part.$LT_ARRAY_INDEX"]
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
"""


def ran(lt: Lt) -> dict[str, int]:
    return {path.stem: len(path.read_text().split()) for path in sorted(lt.folder.glob("*.log"))}


def test_a_pipeline_stops_at_a_failure_goes_on_there_and_skips_what_is_done_by_content(lt: Lt) -> None:
    lt.write(PIPELINE)
    shown = lt.run("run", "run.toml", code=1)
    assert "convert: failed: rank 0" in shown
    once = {"download": 1, "prepare.0": 1, "prepare.1": 1, "prepare.2": 1}
    assert ran(lt) == once | {"convert": 1}
    states = {row["stage"]: row["state"] for row in json.loads(lt.run("status", "wiki", "--json"))}
    assert states == {f"prepare.{i}": "completed" for i in range(3)} | {
        "download": "completed",
        "convert": "failed",
        "export": "pending",
    }
    (lt.folder / "allowed").touch()
    lt.run("run", "run.toml")
    assert ran(lt) == once | {"convert": 2, "export": 1}
    assert (lt.folder / "exported").read_text() == "text\n" * 3
    lt.run("run", "run.toml")
    assert ran(lt) == once | {"convert": 2, "export": 1}
    (lt.folder / "part.1").write_text("mended\n")  # an input of convert changes: it and what comes after it run again
    lt.run("run", "run.toml")
    assert ran(lt) == once | {"convert": 3, "export": 2}
    assert (lt.folder / "exported").read_text() == "text\nmended\ntext\n"
    (lt.folder / "exported").unlink()
    lt.run("run", "run.toml")
    assert ran(lt) == once | {"convert": 3, "export": 3}


def test_elements_run_side_by_side_as_far_as_there_is_room(lt: Lt) -> None:
    """Each of two ends only when the other has begun; those that use the devices never meet."""
    meet = "touch at.$LT_ARRAY_INDEX; until [ -e at.0 -a -e at.1 ]; do sleep 0.01; done; echo here"
    alone = "mkdir running && sleep 0.3 && rmdir running"
    lt.write(
        f'[[stages]]\nname = "p"\narray = 2\nargv = ["bash", "-c", "{meet}"]\n'
        f'[[stages]]\nname = "q"\narray = 2\nargv = ["bash", "-c", "{alone}"]\nresources = {{ gpus_per_node = 1 }}\n'
        f'[[stages]]\nname = "r"\narray = 2\nargv = ["bash", "-c", "{alone}"]\narray_limit = 1\n'
        "[profile.local]\nslots = 2\n"
    )
    shown = lt.run("run", "run.toml")
    assert "[p.0] here" in shown
    assert "[p.1] here" in shown


def test_a_failure_keeps_what_comes_after_it_from_beginning_and_disturbs_no_other(lt: Lt) -> None:
    lt.write(
        """
[pipeline]
out = "runs/p"
[[stages]]
name = "bad"
argv = ["bash", "-c", "exit 7"]
[[stages]]
name = "behind"
after = ["bad"]
argv = ["touch", "behind"]
[[stages]]
name = "good"
argv = ["touch", "good"]
[[stages]]
name = "last"
after = ["good"]
argv = ["touch", "last"]
"""
    )
    shown = lt.run("run", "run.toml", code=7)
    assert "behind: not started, because bad did not succeed" in shown
    assert sorted(path.name for path in lt.folder.iterdir() if path.is_file()) == ["good", "last", "run.toml"]
    states = {row["stage"]: row["state"] for row in json.loads(lt.run("status", "p", "--json"))}
    assert states == {"bad": "failed", "behind": "pending", "good": "completed", "last": "completed"}


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
    kinds = {event["stage"]: event["kind"] for event in lt.events("p") if event["event"] == "attempt_ended"}
    assert kinds == {"p.0": "stopped", "p.1": "stopped"}
    assert not (lt.folder / "at.2").exists()
    assert not (lt.folder / "q").exists()
    assert not lt.pids("sleep 0.01")


def test_a_stage_that_does_not_make_what_it_promised_has_failed(lt: Lt) -> None:
    lt.write('[job]\nargv = ["true"]\n[[stages]]\nname = "a"\noutputs = ["gone.txt"]\n')
    assert "did not make gone.txt" in lt.run("run", "run.toml", code=70)


def test_in_the_background_with_status_logs_and_cancel(lt: Lt) -> None:
    lt.trainer(1000, 0.05)
    shown = lt.run("run", "run.toml", "--detach")
    id_ = re.findall(r"in the background as process (\d+)", shown)[0]
    assert f"job {id_}: x\nfolder: {lt.folder}/runs/x\nnext: lt launch status x\n" in shown
    lt.until(lambda: (lt.folder / "runs/x/checkpoints/step-00000002/COMMIT").exists())
    assert "x is being launched by process" in lt.run("run", "run.toml", code=64).replace(
        str(lt.folder / "runs") + "/", ""
    )
    row = json.loads(lt.run("status", "x", "--json"))[0]
    assert (row["state"], row["attempt"], row["exit_code"], row["job_id"]) == ("running", 0, None, id_)
    assert json.loads(lt.run("status", id_, "--json"))[0]["state"] == "running"
    assert id_ in lt.run("list")
    assert lt.run("logs", "runs/x") == "rank 0 of 2 goes on from step 0\n"
    assert lt.run("logs", "runs/x", "--rank", "1") == "rank 1 of 2 goes on from step 0\n"
    follower = lt.start("logs", "x", "-f")
    assert "training saves and exits" in lt.run("cancel", "x")
    assert follower.communicate(timeout=120)[0] == "rank 0 of 2 goes on from step 0\nrank 0 stopped\n"
    lt.until(lambda: lt.attempts())
    lt.until(lambda: json.loads(lt.run("status", "x", "--json"))[0]["state"] == "cancelled")
    assert "it is not running" in lt.run("cancel", "x")
    assert "cancelled" in lt.run("list")


def test_what_this_machine_alone_cannot_do_is_refused_before_anything_is_written(lt: Lt) -> None:
    lt.write('[job]\nargv = ["true"]\nnodes = 2\n')
    assert "job.nodes = 2" in lt.run("run", "run.toml", code=64)
    assert not (lt.folder / "runs").exists()


def test_a_variable_by_name_that_is_not_there_is_refused_before_anything_is_written(lt: Lt) -> None:
    lt.write('[job]\nargv = ["true"]\npass_env = ["MY_OWN_TOKEN"]\n')
    told = lt.run("run", "run.toml", code=64)
    assert "job.pass_env = 'MY_OWN_TOKEN': is passed by name" in told
    assert "export MY_OWN_TOKEN" in told
    assert not (lt.folder / "runs").exists()
    lt.run("run", "run.toml", env={"MY_OWN_TOKEN": ""})


def test_a_folder_of_something_else_is_left_alone(lt: Lt) -> None:
    (lt.folder / "mine" / "launch").mkdir(parents=True)
    (lt.folder / "mine" / "launch" / "thesis.txt").touch()
    lt.write('[job]\nargv = ["true"]\n')
    assert "is not a launch directory" in lt.run("run", "run.toml", "--out", "mine", code=64)
    assert [path.name for path in (lt.folder / "mine" / "launch").iterdir()] == ["thesis.txt"]
