"""Units: the same store from any number of processes, whatever is killed, and errors that lose nothing."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lt_data import DataError, SourceOptions, TokenStore, prepare
from lt_data.sources.reader import DocumentReader
from lt_data.store.manifest import Selection

Contents = Callable[[Path], dict[str, bytes]]

KILLS = int(os.environ.get("LT_KILLS", "50"))
SEED = int(os.environ.get("LT_SEED", "23"))
UNIT_BYTES = 40_000
PACKAGE = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer) -> Path:
    """A tokenizer and twelve files of 1 to 60 kB, one of them larger than a unit; some documents are in several."""
    folder = tmp_path_factory.mktemp("units")
    tokenizer.save(folder / "tok")
    (folder / "in").mkdir()
    rng = np.random.default_rng(5)
    for number, n_documents in enumerate([30, 5, 1, 60, 2, 40, 25, 1, 1, 20, 33, 8]):
        texts = [" ".join(map(str, rng.integers(0, 10**9, int(n)))) for n in rng.integers(1, 200, n_documents)]
        texts += [f"in every file {i}" for i in range(3)]
        lines = "".join(f'{{"text": "{text}"}}\n' for text in texts)
        (folder / f"in/{number:02d}.jsonl").write_text(lines, encoding="utf-8")
    return folder


@pytest.fixture
def run(folder, tmp_path) -> dict[str, Any]:
    """The options of the jobs of these tests."""
    return {"tokenizer": folder / "tok", "out": tmp_path / "store", "unit_bytes": UNIT_BYTES, "engine": "hf"}


@pytest.fixture(scope="module", params=[False, True], ids=["all", "without duplicates"])
def undisturbed(folder, tmp_path_factory, request) -> Path:
    """The store of an undisturbed job."""
    out = tmp_path_factory.mktemp("undisturbed") / ("distinct" if request.param else "store")
    subprocess.run(command(folder, out, 1), check=True, capture_output=True)
    assert len(list((out / "units").glob("0*"))) > 4
    return out


def command(folder: Path, out: Path, workers: int, unit_bytes: int = UNIT_BYTES) -> list[str]:
    options = ["--unit-bytes", str(unit_bytes), "--workers", str(workers), "--engine", "hf"]
    options += ["--drop-duplicates"] if out.name == "distinct" else []
    sources = ["prepare", str(folder / "in"), "--tokenizer", str(folder / "tok"), "--out", str(out)]
    return [sys.executable, "-m", "lt_data", *sources, *options]


def test_the_documents_are_those_of_one_unit(folder, undisturbed, run):
    chosen = Selection(drop_duplicates=undisturbed.name == "distinct")
    flat = prepare([folder / "in"], selection=chosen, **{**run, "unit_bytes": 2**30, "workers": 2})
    units, one = TokenStore(undisturbed), TokenStore(run["out"])
    assert (units.n_documents, units.n_tokens) == (flat.documents, flat.tokens)
    for number in range(units.n_documents):
        assert np.array_equal(units[number], one[number])
    units.verify()
    assert not (run["out"] / "units").exists()
    assert {path.name for path in (undisturbed / "units").iterdir() if not path.is_dir()} == set()
    before = {path: path.stat().st_mtime_ns for path in run["out"].rglob("*")}
    assert prepare([folder / "in"], selection=chosen, **{**run, "unit_bytes": 2**30}) == flat
    assert before == {path: path.stat().st_mtime_ns for path in run["out"].rglob("*")}, "there is nothing to do"


def test_workers_share_a_small_corpus(folder, run, tmp_path, contents, monkeypatch):
    """The units follow the bytes of the sources alone, so the store is the same from any number of workers."""
    monkeypatch.setattr("lt_data.preparation.prepare.MIN_UNIT_BYTES", 50_000)
    del run["unit_bytes"]
    size = sum(path.stat().st_size for path in (folder / "in").iterdir())
    notices: list[str] = []
    for workers in (1, 3, 99):
        run |= {"workers": workers, "out": tmp_path / str(workers)}
        prepare([folder / "in"], **run, notify=notices.append)
    n_units = len(list((tmp_path / "1/units").iterdir()))
    assert 4 < n_units <= -(-size // 50_000)
    assert contents(tmp_path / "1") == contents(tmp_path / "3") == contents(tmp_path / "99")
    remedy = "one process each; --unit-bytes divides them further"
    said = [notice for notice in notices if not notice.startswith("tokenizer ")]
    assert said == [f"workers = 99: the sources are {n_units} units, {remedy}"]


@pytest.mark.parametrize(("workers", "commands", "unit_bytes"), [(3, 1, UNIT_BYTES), (1, 2, UNIT_BYTES), (1, 3, 2**30)])
def test_any_number_of_processes_makes_the_same_store(
    workers, commands, unit_bytes, folder, undisturbed, tmp_path, contents
):
    out, expected = tmp_path / undisturbed.name, undisturbed
    if unit_bytes != UNIT_BYTES:
        expected = tmp_path / "one" / out.name
        subprocess.run(command(folder, expected, 1, unit_bytes), check=True, capture_output=True)
    jobs = [subprocess.Popen(command(folder, out, workers, unit_bytes)) for _ in range(commands)]
    assert [job.wait(timeout=120) for job in jobs] == [0] * commands
    assert contents(out) == contents(expected)
    assert not [path.name for path in tmp_path.iterdir() if "work-" in path.name]


def kill_at_random(folder: Path, out: Path, expected: dict[str, bytes], contents: Contents, *, kills: int) -> None:
    """Keep three commands at work on a job, one of them with two workers; kill one of them at a time."""
    rng = random.Random(SEED)
    running: list[subprocess.Popen[bytes]] = []
    done = 0
    while done < kills:
        running = [job for job in running if job.poll() is None]
        while len(running) < 3:
            running.append(subprocess.Popen(command(folder, out, rng.choice([1, 1, 2])), start_new_session=True))
        time.sleep(rng.uniform(0.05, 0.5))
        if (out / "manifest.json").exists():  # begin anew, or nothing would be at work
            for job in running:
                assert job.wait(timeout=120) == 0
            assert contents(out) == expected
            shutil.rmtree(out)
            continue
        victim = rng.choice(running)
        if victim.poll() is None:
            os.killpg(victim.pid, signal.SIGKILL)
            victim.wait()
            done += 1
    for job in running:
        job.send_signal(signal.SIGKILL)  # alone: its workers end by themselves
        job.wait()
    subprocess.run(command(folder, out, 1), check=True, capture_output=True)
    assert contents(out) == expected


@pytest.mark.parametrize("kills", [2, pytest.param(KILLS, marks=pytest.mark.slow)])
def test_kills_of_local_processes(kills, folder, undisturbed, tmp_path, contents):
    kill_at_random(folder, tmp_path / undisturbed.name, contents(undisturbed), contents, kills=kills)


def test_a_worker_that_dies_is_an_error_and_the_units_stay(folder, run, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "lethal.py").write_text(
        "import os\n"
        "def spare(record):\n"
        "    if record['text'].startswith('lethal') and os.path.exists('is-lethal'):\n"
        "        os.kill(os.getpid(), 9)\n"
        "    return record\n"
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "is-lethal").touch()
    (tmp_path / "lethal.jsonl").write_text('{"text": "lethal"}\n', encoding="utf-8")
    sources = [folder / "in", tmp_path / "lethal.jsonl"]
    run |= {"record_map": "lethal:spare", "unit_bytes": 8000}
    with pytest.raises(DataError, match=r"a worker process died; if memory ran out .* run the same command again"):
        prepare(sources, workers=2, **run)
    (tmp_path / "is-lethal").unlink()
    assert prepare(sources, workers=2, **run).documents == 227 + 36
    assert not list(run["out"].rglob("work-*"))


def test_workers_end_with_their_command(folder, tmp_path, wait_for):
    out = tmp_path / "store"
    job = subprocess.Popen(command(folder, out, 2, 9000), stderr=subprocess.PIPE)
    wait_for(lambda: bool(list(out.glob("units/*-of-*/manifest.json"))) or job.poll() is not None)
    job.kill()
    job.communicate(timeout=60)  # until the last of them has closed it
    assert job.returncode == -signal.SIGKILL


def test_a_unit_that_fails_is_named_and_the_others_finish(folder, run, tmp_path, contents):
    """The next call corrects or leaves out bad input; the units that were finished stay."""
    shutil.copytree(folder / "in", tmp_path / "in")
    bad = tmp_path / "in" / "05.jsonl"
    good = bad.read_bytes()
    bad.write_bytes(good[:-1] + b"}")
    for workers in (2, 1):
        with pytest.raises(
            DataError, match=r"1 of \d+ units failed, the others are finished; 0000\d-of-0000\d: .*05\.jsonl"
        ):
            prepare([tmp_path / "in"], workers=workers, **run)
    with pytest.raises(DataError, match=r"not all of its units are prepared; run the same lt data prepare"):
        TokenStore(run["out"])
    finished = {path: path.stat().st_mtime_ns for path in run["out"].glob("units/0*/manifest.json")}
    assert len(finished) > 4
    shutil.copytree(run["out"], tmp_path / "copy")
    bad.write_bytes(good)
    assert prepare([tmp_path / "in"], **run).documents == 226 + 36
    assert all(path.stat().st_mtime_ns == before for path, before in finished.items())
    bad.write_bytes(good[:-1] + b"}")
    skipping = prepare([tmp_path / "in"], options=SKIP, **{**run, "out": tmp_path / "copy"})
    assert skipping.skipped == {"broken JSON line": 1}
    prepare([tmp_path / "in"], options=SKIP, **{**run, "out": tmp_path / "skip"})
    found, expected = contents(tmp_path / "copy"), contents(tmp_path / "skip")
    assert found.pop("plan.json") != expected.pop("plan.json")
    assert found == expected
    with pytest.raises(DataError, match=r"on_bad was skip and is error; choose another folder, or remove this one$"):
        prepare([tmp_path / "in"], **{**run, "out": tmp_path / "skip"})


SKIP = SourceOptions(on_bad="skip")


@pytest.mark.parametrize("unit_bytes", [5, 2**30])
def test_units_without_any_document(tmp_path, run, unit_bytes):
    (tmp_path / "in").mkdir()
    for number in range(3):
        (tmp_path / f"in/{number}.jsonl").write_text('{"text": ""}\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"no text in (any of the \d units|3 files .*) \(3 empty\): check the sources"):
        prepare([tmp_path / "in"], **{**run, "unit_bytes": unit_bytes})
    assert not list(tmp_path.glob("*/manifest.json"))
    (tmp_path / "in/1.jsonl").write_text('{"text": "something"}\n', encoding="utf-8")
    run["out"] = tmp_path / "other"
    assert prepare([tmp_path / "in"], **{**run, "unit_bytes": unit_bytes}).documents == 1


def test_another_job_in_the_folder_is_refused(folder, run, tmp_path):
    shutil.copytree(folder / "in", tmp_path / "in")
    for unit_bytes in (UNIT_BYTES, 2**30):
        run |= {"unit_bytes": unit_bytes, "out": tmp_path / str(unit_bytes)}
        prepare([tmp_path / "in"], **run)
        for changed in ({"unit_bytes": 20_000}, {"eos": False}, {"selection": Selection(min_tokens=3)}):
            with pytest.raises(DataError, match=r"of a job with other settings: .* was .* and is .*; choose another"):
                prepare([tmp_path / "in"], **{**run, **changed})
        last = tmp_path / "in" / "07.jsonl"
        content = last.read_bytes()
        last.write_bytes(content * 2)
        with pytest.raises(DataError, match=r"of a job with other settings: .*listing of the sources"):
            prepare([tmp_path / "in"], **run)
        last.write_bytes(content)
        with pytest.raises(DataError, match="holds a token store already; choose another folder, or remove this one"):
            prepare([{"text": "x"}], tokenizer=run["tokenizer"], out=run["out"])
    assert DocumentReader([tmp_path / "in"]).n_files == 12


@pytest.mark.slow
def test_kills_of_workers_of_a_ray_cluster(folder, undisturbed, tmp_path, contents):
    """Ray is in no environment of ours: uv makes one in a temporary folder."""
    if shutil.which("uv") is None:
        pytest.skip("uv, which makes the environment with ray, is not installed")
    python = tmp_path / "environment" / "bin" / "python"
    subprocess.run(["uv", "venv", "-q", "--python", sys.executable, tmp_path / "environment"], check=True)
    install = ["uv", "pip", "install", "-q", "--python", python, "psutil", "-e", f"{PACKAGE}[cli,ray]"]
    subprocess.run(install, check=True)
    job = [folder / "in", folder / "tok", tmp_path / undisturbed.name, KILLS, SEED]
    script = list(map(str, [python, Path(__file__).with_name("ray_kills.py"), *job]))
    # if `uv run` started pytest, Ray would repeat it for each worker, in another environment than that of this test
    environment = {**os.environ, "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
    done = subprocess.run(script, capture_output=True, encoding="utf-8", timeout=900, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == str(KILLS)
    found, expected = contents(tmp_path / undisturbed.name), contents(undisturbed)
    assert found.pop("plan.json") != expected.pop("plan.json"), "no gigatoken there"
    assert found == expected
