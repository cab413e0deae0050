"""Real processes, killed: the same command resumes with the same bytes; two never write at once."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from lt_data import Tokenizer, part_folder

Contents = Callable[[Path], dict[str, bytes]]
WaitFor = Callable[[Callable[[], bool]], None]

KILLS = int(os.environ.get("LT_KILLS", "100"))
SEED = int(os.environ.get("LT_SEED", "0"))
OPTIONS = ["--engine", "hf", "--shard-tokens", "4000", "--drop-duplicates", "--min-tokens", "20"]
KEEP = ["n:int"] if find_spec("pyarrow") else []


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """A folder with a tokenizer and half a megabyte of text in JSON lines, an eighth of it repeated."""
    folder = tmp_path_factory.mktemp("kill")
    tokenizer.save(folder / "tok")
    (folder / "in").mkdir()
    rng = np.random.default_rng(3)
    known = [" ".join(map(str, rng.integers(0, 10**9, 40))) for _ in range(40)]
    for number in range(8):
        texts = [" ".join(map(str, rng.integers(0, 10**9, int(n)))) for n in rng.integers(1, 300, 40)]
        lines = [f'{{"text": "{text}", "n": {n}}}\n' for n, text in enumerate((*texts, *known[number * 5 :]))]
        (folder / f"in/{number}.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def command(sources: Path, *arguments: object) -> list[str]:
    return [sys.executable, "-m", "lt_data", *map(str, arguments)]


def prepare_command(sources: Path, out: Path, *more: object) -> list[str]:
    given = (
        "prepare",
        sources / "in",
        "--tokenizer",
        sources / "tok",
        "--out",
        out,
        *OPTIONS,
        *(["--keep", *KEEP] if KEEP else []),
        *more,
    )
    return command(sources, *given)


@pytest.fixture(scope="module")
def whole(sources: Path, tmp_path_factory: pytest.TempPathFactory, contents: Contents) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("whole") / "store"
    subprocess.run(prepare_command(sources, out), check=True, capture_output=True)
    n_shards = len(list(out.glob("shards/*.bin")))
    assert (len(list(out.glob("shards/*.src"))), len(list(out.glob("shards/*.arrow")))) == (
        n_shards,
        n_shards if KEEP else 0,
    )
    return contents(out)


def kill_until_done(commands: list[list[str]], at_work: Path, rng: random.Random, wait_for: WaitFor) -> int:
    """Run commands one after the other, each until it ends by itself; gives how often they were killed at work."""
    kills = 0
    for arguments in commands:
        while True:
            child = subprocess.Popen(
                arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
            )
            assert child.stderr is not None
            wait_for(lambda child=child: has_begun(at_work, child.pid) or child.poll() is not None)
            if child.poll() is None:
                time.sleep(rng.uniform(0, 0.4))
            was_at_work = child.poll() is None and rng.random() < 0.8
            if was_at_work and rng.random() < 0.5:
                os.killpg(child.pid, signal.SIGKILL)  # with its workers
            elif was_at_work:
                child.kill()  # alone: the workers have to end by themselves
            said = child.stderr.read().decode()  # until the last of them has closed it
            child.stderr.close()
            code = child.wait()
            if code == -signal.SIGKILL:
                kills += 1
                continue
            # Killed after it had cleared all away, it finds a finished store when it is run again.
            assert code == 0 or "holds a token store already" in said, said
            break
    return kills


def has_begun(at_work: Path, pid: int) -> bool:
    """Return True if the process holds the lock of the folder."""
    try:
        return f"process {pid} " in (at_work / "lock").read_text(encoding="utf-8")
    except OSError:
        return False


def check_kills(
    sources: Path,
    whole: dict[str, bytes],
    folder: Path,
    contents: Contents,
    wait_for: WaitFor,
    *,
    least: int,
    seed: int,
) -> int:
    rng = random.Random(seed)
    kills = round_ = 0
    while kills < least:
        out = folder / f"{round_}" / "store"
        workers = (1, 2)[round_ % 2]
        kills += kill_until_done(
            [prepare_command(sources, out, "--workers", workers)], out.with_name("store.building"), rng, wait_for
        )
        assert contents(out.parent) == {f"store/{name}": content for name, content in whole.items()}
        round_ += 1
        assert round_ < 10 * least
    return kills


def test_kill_9_at_random_moments(
    fast_path: Path, sources: Path, whole: dict[str, bytes], contents: Contents, wait_for: WaitFor
) -> None:
    assert check_kills(sources, whole, fast_path, contents, wait_for, least=3, seed=1) >= 3


@pytest.mark.slow
def test_a_hundred_kills(
    fast_path: Path, sources: Path, whole: dict[str, bytes], contents: Contents, wait_for: WaitFor
) -> None:
    kills = check_kills(sources, whole, fast_path, contents, wait_for, least=KILLS, seed=SEED)
    assert kills >= KILLS
    sys.stdout.write(f"{kills} kills of prepare (seed {SEED}): every result byte-identical\n")


@pytest.mark.slow
def test_kills_of_ranks_and_of_the_merge(
    fast_path: Path, sources: Path, whole: dict[str, bytes], contents: Contents, wait_for: WaitFor
) -> None:
    rng = random.Random(SEED)
    kills = 0
    for round_ in range(max(1, KILLS // 20)):
        out = fast_path / f"{round_}" / "store"
        for rank in (2, 0, 1):
            part = part_folder(out, rank, 3)
            run = prepare_command(sources, out, "--part", rank, "--num-parts", 3)
            kills += kill_until_done([run], part.with_name(f"{part.name}.building"), rng, wait_for)
        kills += kill_until_done([command(sources, "merge", out)], out.with_name("store.building"), rng, wait_for)
        found = contents(out)
        assert found.keys() == whole.keys()
        assert {name for name in found if found[name] != whole[name]} == {"manifest.json"}
    sys.stdout.write(f"{kills} kills of ranks and merges (seed {SEED}): every result identical\n")


HOLD = """
import sys, lt_data
def wait(done, total, unit):
    print("at work", flush=True)
    sys.stdin.readline()
lt_data.prepare([{sources!r} + "/in"], tokenizer={sources!r} + "/tok", out={out!r}, engine="hf", shard_tokens=4000,
                selection=lt_data.Selection(drop_duplicates=True, min_tokens=20), progress=wait,
                keep={keep!r})
"""


@pytest.fixture
def holder(fast_path: Path, sources: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process at work on fast_path/store, which goes on line by line."""
    code = HOLD.format(sources=str(sources), out=str(fast_path / "store"), keep=KEEP)
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdin is not None
    assert child.stdout.readline() == b"at work\n"
    yield child
    child.kill()
    child.wait()
    child.stdin.close()
    child.stdout.close()


def test_two_processes_with_one_folder(
    fast_path: Path, sources: Path, whole: dict[str, bytes], contents: Contents, holder: subprocess.Popen[bytes]
) -> None:
    second = prepare_command(sources, fast_path / "store")
    for more in ([], ["--no-resume"]):
        run = subprocess.run([*second, *more], capture_output=True, encoding="utf-8", check=False)
        assert run.returncode == 64, run.stderr
        assert f"{fast_path / 'store'}: another process is writing it (process {holder.pid} on " in run.stderr
    holder.kill()
    holder.wait()
    subprocess.run(second, check=True, capture_output=True)  # the lock is gone with its holder
    assert contents(fast_path) == {f"store/{name}": content for name, content in whole.items()}


def test_the_other_process_finishes_meanwhile(
    fast_path: Path, sources: Path, whole: dict[str, bytes], contents: Contents, holder: subprocess.Popen[bytes]
) -> None:
    holder.communicate(b"\n" * 10_000)
    assert holder.returncode == 0
    run = subprocess.run(
        prepare_command(sources, fast_path / "store"), capture_output=True, encoding="utf-8", check=False
    )
    assert run.returncode == 64
    assert "holds a token store already" in run.stderr
    assert contents(fast_path) == {f"store/{name}": content for name, content in whole.items()}


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to find the workers")
def test_a_worker_that_is_killed_is_an_error_at_once_and_its_work_is_kept(
    fast_path: Path, sources: Path, whole: dict[str, bytes], contents: Contents, wait_for: WaitFor
) -> None:
    out = fast_path / "store"
    many = fast_path / "many"
    many.mkdir()
    for number in range(8):  # so that it does not end before its worker is found
        for path in (sources / "in").iterdir():
            (many / f"{number:02d}-{path.name}").write_bytes(path.read_bytes())
    arguments = ["prepare", many, "--tokenizer", sources / "tok", "--out", out, "--engine", "hf", "--workers", 2]
    run = command(sources, *arguments, "--shard-tokens", 60_000)
    child = subprocess.Popen(run, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
    try:
        wait_for(lambda: len(list(out.with_name("store.building").glob("store/shards/*.idx"))) > 1)
        workers = [pid for pid in session_members(child.pid) if b"spawn_main" in command_line(pid)]
        assert len(workers) == 2
        os.kill(workers[0], signal.SIGKILL)
        assert child.stderr is not None
        said = child.stderr.read().decode()
        assert child.wait() == 64
    finally:
        child.kill()
        child.wait()
        if child.stderr is not None:
            child.stderr.close()
    assert "a worker process died" in said
    assert "finished shards are kept in" in said


def session_members(session: int) -> list[int]:
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if fields[0] != "Z" and int(fields[3]) == session:
            found.append(int(path.parent.name))
    return found


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
