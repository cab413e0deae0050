"""A real Slurm cluster on this machine: slurmctld, three slurmd and munge in a scratch folder, gone at the end.

It needs root and Debian's packages (slurmctld slurmd slurm-client munge libslurm-dev gcc); without them these tests are
skipped, and say so.
"""

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from lt_launch.launch_dir import load_launch
from lt_launch.launcher import launch
from lt_launch.policy import Place, read_table
from lt_launch.profile import Profile
from lt_launch.run_file import RunOverrides, read_run_file
from lt_launch.target import Launch
from lt_test_helpers.stores import make_stores

NEEDED = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "munged", "gcc")
POLL_S = 0.1
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL")
HERE = Path(__file__).parent


class Cluster:
    """The daemons of a cluster in one folder."""

    nodes = ("n1", "n2", "n3")

    def __init__(self, base: Path) -> None:
        self.base = base
        self._hurried: set[tuple[str, str]] = set()
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("state", "run", "log", *(f"spool/{node}" for node in self.nodes)):
            (base / name).mkdir(parents=True)
        ports = _free_ports(4)
        values = {"host": socket.gethostname(), "base": base, "port": ports[0]}
        text = (HERE / "data" / "slurm.conf").read_text()
        text = text.format(**values, **dict(zip(self.nodes, ports[1:], strict=True)))
        (base / "slurm.conf").write_text(text)
        (base / "plugstack.conf").write_text(f"required {base}/stub.so\n")
        (base / "munge.key").write_bytes(os.urandom(1024))
        (base / "munge.key").chmod(0o600)
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", base / "stub.so", HERE / "spank_stub.c"], check=True)

    def start(self) -> None:
        """Start everything and wait until all nodes are idle."""
        base = self.base
        munge = ["munged", "--force", f"--key-file={base}/munge.key", f"--socket={base}/munge.socket"]
        munge += [f"--pid-file={base}/munged.pid", f"--log-file={base}/munged.log", f"--seed-file={base}/munged.seed"]
        self._daemon("munged", *munge[1:], "--foreground")
        self.wait_for((base / "munge.socket").exists, "munge")
        self.start_controller("-c")
        for node in self.nodes:
            self.start_node(node, "-c")
        self.wait_for(lambda: self.states() == dict.fromkeys(self.nodes, "idle"), "all nodes idle")

    def start_controller(self, *options: str) -> None:
        self._daemon("slurmctld", "-D", *options)
        self.wait_for(lambda: "is UP" in self.run("scontrol", "ping", code=None), "the controller")

    def start_node(self, node: str, *options: str) -> None:
        self._daemon(f"slurmd-{node}", "-D", "-N", node, *options)

    def _daemon(self, name: str, *options: str) -> None:
        """A child that the kernel kills when this process dies, however that may be."""
        program = shutil.which(name.partition("-")[0])
        assert program is not None
        nowhere = subprocess.DEVNULL
        self.daemons[name] = subprocess.Popen(
            [program, *options], stdin=nowhere, stdout=nowhere, stderr=nowhere, preexec_fn=_die_with_parent
        )

    def stop_controller(self) -> None:
        self.daemons["slurmctld"].terminate()
        self.daemons["slurmctld"].wait(60)

    def kill_node(self, node: str) -> None:
        """SIGKILL to slurmd of a node and to everything that it runs, as if the machine lost its power."""
        self.daemons[f"slurmd-{node}"].kill()
        self.daemons[f"slurmd-{node}"].wait(60)
        self._end_all_of(node)

    def _end_all_of(self, node: str) -> None:
        """Kill the tasks of a node, which say so in their environment, and the step daemons that are their parents."""
        for process in self.processes(SLURM_CONF=f"{self.base}/slurm.conf", SLURMD_NODENAME=node):
            with suppress(psutil.NoSuchProcess):
                daemons = [one for one in process.parents() if "slurmstepd" in one.name()]
                for one in [*daemons, process]:
                    one.kill()

    def states(self) -> dict[str, str]:
        rows = self.run("sinfo", "-h", "-N", "-p", "low", "-o", "%N %t", code=None).splitlines()
        return dict(row.split() for row in rows)

    def run(self, *words: str, code: int | None = 0) -> str:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert code is None or done.returncode == code, (words, done.stdout, done.stderr)
        return done.stdout

    def job(self, id_: str) -> dict[str, str]:
        """What the controller shows of a job; one that is busy is asked again."""
        text = self.wait_for(lambda: self.run("scontrol", "-o", "show", "job", id_, code=None), f"job {id_}", 20)
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def job_in_a_hurry(self, id_: str) -> dict[str, str]:
        """Spare a requeued job the two minutes that Slurm lets it wait; what the controller shows of it.

        Not the second in which its old credential was revoked, or the new one counts as revoked too.
        """
        job = self.job(id_)
        start = (id_, job.get("Restarts", "0"))
        if job["JobState"] == "PENDING" and start[1] != "0" and start not in self._hurried:
            self._hurried.add(start)
            subprocess.run(["scontrol", "update", f"JobId={id_}", "StartTime=now+3"], capture_output=True, check=False)
        return job

    def wait_for(self, condition: Callable[[], Any], what: str, timeout_s: float = 120.0) -> Any:
        """Look again and again, as often as fits into the time: a machine that stands still does not count."""
        for _ in range(round(timeout_s / POLL_S)):
            found = condition()
            if found:
                return found
            time.sleep(POLL_S)
        raise AssertionError(f"{what} did not come; {self.tail()}")

    def wait_for_end(self, id_: str, timeout_s: float = 240.0) -> dict[str, str]:
        """Wait until a job, or every element of an array, has ended for good; requeued ones are started at once."""

        def ended() -> dict[str, str] | None:
            self.job_in_a_hurry(id_)
            states = self.run("squeue", "-h", "-r", "-t", "all", "-j", id_, "-o", "%T", code=None).split()
            return self.job(id_) if states and set(states) <= set(ENDED) else None

        return self.wait_for(ended, f"the end of job {id_}", timeout_s)

    @staticmethod
    def processes(**variables: str) -> list[psutil.Process]:
        """Processes that have these variables in their environment."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                found += [process] if variables.items() <= process.environ().items() else []
        return found

    @staticmethod
    def exits(made: Launch, stage: str) -> list[dict[str, Any]]:
        """How the attempts of a stage ended."""
        place = Place(made.directory / "stages" / stage / "spec.json")
        return [read_table(place.attempt(number) / "exit.json") or {} for number in place.attempts()]

    def tail(self) -> str:
        text = "".join(f"--- {path.name}\n" + path.read_text()[-800:] for path in sorted((self.base / "log").iterdir()))
        return text + self.run("scontrol", "-o", "show", "job", code=None)

    def close(self) -> None:
        """Kill all that belongs to the folder."""
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(["scancel", "--user=root"], capture_output=True, check=False, timeout=20)
        for node in self.nodes:
            self._end_all_of(node)
        for daemon in self.daemons.values():
            daemon.kill()
            daemon.wait(60)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The cluster of this test session."""
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(
            "NO SLURM CLUSTER IS TESTED HERE: it needs root and "
            f"apt-get install slurmctld slurmd slurm-client munge libslurm-dev gcc (missing: {', '.join(missing)})"
        )
    base = Path(tempfile.mkdtemp(prefix="lt-slurm-", dir="/tmp"))
    made = Cluster(base)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(base / "slurm.conf"))
        try:
            made.start()
            yield made
        finally:
            made.close()
            shutil.rmtree(base, ignore_errors=True)


@pytest.fixture
def submit(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Launch]:
    """Submit a run file of `tmp_path`, written with a text and the nodes' interpreter if there is a text."""
    monkeypatch.setenv("LT_LAUNCH_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)

    def go(text: str = "", *, name: str = "run.toml", python: str = sys.executable) -> Launch:
        if text:
            table = f'[profile]\npython = "{python}"\n'
            text = text.replace("[profile]\n", table) if "[profile]\n" in text else f"{text}\n{table}"
            Path(name).write_text(text)
        file = read_run_file(name, Profile(), RunOverrides())
        assert launch(file.pipeline, file.profile, "slurm") == 0
        return load_launch(tmp_path / file.pipeline.out)

    return go


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Put a program before the real one of its name, which is REAL in its text, as FOLDER is `tmp_path`."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def write(name: str, text: str) -> None:
        (folder / name).write_text(text.replace("REAL", shutil.which(name) or "").replace("FOLDER", str(tmp_path)))
        (folder / name).chmod(0o755)
        if not os.environ["PATH"].startswith(f"{folder}:"):
            monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    return write


@pytest.fixture
def enroot(tmp_path: Path, fake: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the stand-in for enroot, and one for an EFA device, in the nodes' PATH; the folder of its records."""
    fake("enroot", (HERE / "enroot_stand_in.sh").read_text())
    fake("fi_info", "#!/bin/sh\nexit 0\n")
    monkeypatch.setenv("ENROOT_STAND_IN", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small packed token store."""
    root = tmp_path_factory.mktemp("data")
    make_stores(root, {"store": 60})
    return root / "store"
