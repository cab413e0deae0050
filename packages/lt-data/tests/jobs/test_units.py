"""Units: the same store from any number of processes, whatever is killed, and errors that lose nothing."""

import errno
import fcntl
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lt_data import (
    DataError,
    DocumentReader,
    Selection,
    SourceOptions,
    Tokenizer,
    TokenStore,
    prepare,
    prepare_documents,
)

Contents = Callable[[Path], dict[str, bytes]]

KILLS = int(os.environ.get("LT_KILLS", "50"))
SEED = int(os.environ.get("LT_SEED", "23"))
UNIT_BYTES = 40_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """A tokenizer and twelve files of 1 to 60 kB, one of them larger than a unit."""
    folder = tmp_path_factory.mktemp("units")
    tokenizer.save(folder / "tok")
    (folder / "in").mkdir()
    rng = np.random.default_rng(5)
    for number, n_documents in enumerate([30, 5, 1, 60, 2, 40, 25, 1, 1, 20, 33, 8]):
        texts = [" ".join(map(str, rng.integers(0, 10**9, int(n)))) for n in rng.integers(1, 200, n_documents)]
        lines = "".join(f'{{"text": "{text}"}}\n' for text in texts)
        (folder / f"in/{number:02d}.jsonl").write_text(lines, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def undisturbed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "store"
    prepare([folder / "in"], tokenizer=folder / "tok", out=out, unit_bytes=UNIT_BYTES, engine="hf")
    assert len(list((out / "units").glob("0*"))) > 4
    return out


def command(folder: Path, out: Path, workers: int) -> list[str]:
    options = ["--unit-bytes", str(UNIT_BYTES), "--workers", str(workers), "--engine", "hf"]
    sources = ["prepare", str(folder / "in"), "--tokenizer", str(folder / "tok"), "--out", str(out)]
    return [sys.executable, "-m", "lt_data", *sources, *options]


def test_the_documents_are_those_of_one_store(folder: Path, undisturbed: Path, tmp_path: Path) -> None:
    reader = DocumentReader([folder / "in"]).divided(UNIT_BYTES)
    assert reader.n_files > len(list((folder / "in").iterdir()))
    flat = prepare_documents(reader, tokenizer=Tokenizer.load(folder / "tok"), out=tmp_path / "flat", engine="hf")
    joined, one = TokenStore(undisturbed), TokenStore(tmp_path / "flat")
    assert (joined.n_documents, joined.n_tokens) == (flat.documents, flat.tokens)
    for number in range(joined.n_documents):
        assert np.array_equal(joined[number], one[number])
        assert joined.document_source(number) == one.document_source(number)
    assert {path.name for path in (undisturbed / "units").iterdir() if not path.is_dir()} == {"plan.json"}


def test_one_unit_is_enough(folder: Path, tmp_path: Path) -> None:
    options = {"tokenizer": folder / "tok", "engine": "hf"}
    manifest = prepare([folder / "in"], out=tmp_path / "store", unit_bytes=2**30, workers=2, **options)
    assert manifest.documents == prepare([folder / "in"], out=tmp_path / "flat", **options).documents
    assert TokenStore(tmp_path / "store").n_tokens == TokenStore(tmp_path / "flat").n_tokens


def test_a_file_system_without_locks(
    folder: Path, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, contents: Contents
) -> None:
    """Many shared file systems refuse `flock`, or do not tell other machines of it."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    prepare([folder / "in"], tokenizer=folder / "tok", out=tmp_path / "store", unit_bytes=UNIT_BYTES, engine="hf")
    assert contents(tmp_path / "store") == contents(undisturbed)


@pytest.mark.parametrize(("workers", "commands"), [(3, 1), (1, 2)])
def test_any_number_of_processes_makes_the_same_store(
    workers: int, commands: int, folder: Path, undisturbed: Path, tmp_path: Path, contents: Contents
) -> None:
    jobs = [subprocess.Popen(command(folder, tmp_path / "store", workers)) for _ in range(commands)]
    assert [job.wait(timeout=120) for job in jobs] == [0] * commands
    assert contents(tmp_path / "store") == contents(undisturbed)


def kill_at_random(
    folder: Path, out: Path, expected: dict[str, bytes], contents: Contents, *, workers: int, kills: int, seed: int
) -> None:
    """Keep `workers` processes at work on a job, again and again, and kill one of them at a time."""
    rng = random.Random(seed)
    running: list[subprocess.Popen[bytes]] = []
    done = 0
    while done < kills:
        running = [job for job in running if job.poll() is None]
        running += [subprocess.Popen(command(folder, out, 1)) for _ in range(workers - len(running))]
        time.sleep(rng.uniform(0.05, 0.5))
        if (out / "manifest.json").exists():  # begin anew, or nothing would be at work
            for job in running:
                assert job.wait(timeout=120) == 0
            assert contents(out) == expected
            shutil.rmtree(out)
            continue
        victim = rng.choice(running)
        if victim.poll() is None:
            victim.send_signal(signal.SIGKILL)
            victim.wait()
            done += 1
    for job in running:
        job.kill()
        job.wait()
    subprocess.run(command(folder, out, 1), check=True, capture_output=True)
    assert contents(out) == expected


def test_what_a_process_left_that_was_killed_after_the_join_is_removed(
    folder: Path, undisturbed: Path, tmp_path: Path, contents: Contents
) -> None:
    out = tmp_path / "store"
    shutil.copytree(undisturbed, out)
    (out / "units" / "00001-of-00009.claim").write_text("process 1\n", encoding="utf-8")
    (out / "units" / "work-0123456789abcdef").mkdir()
    for name in ("units/work-0123456789abcdef.json", "manifest.json.tmp-01234567", "joined.index.tmp-01234567"):
        (out / name).write_text("{}", encoding="utf-8")
    prepare([folder / "in"], tokenizer=folder / "tok", out=out, unit_bytes=UNIT_BYTES, engine="hf")
    assert contents(out) == contents(undisturbed)


def test_a_slow_start_beside_a_process_that_ends_the_job(
    folder: Path, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, contents: Contents
) -> None:
    """Another process does the whole job, and removes what is left, before this one has put its plan in place."""
    out, link = tmp_path / "store", os.link
    run = {"tokenizer": folder / "tok", "out": out, "unit_bytes": UNIT_BYTES, "engine": "hf"}

    def late_link(*paths: str) -> None:
        monkeypatch.setattr(os, "link", link)
        prepare([folder / "in"], **run)
        link(*paths)

    monkeypatch.setattr(os, "link", late_link)
    assert prepare([folder / "in"], **run).documents == TokenStore(undisturbed).n_documents
    assert contents(out) == contents(undisturbed)


def test_some_kills(folder: Path, undisturbed: Path, tmp_path: Path, contents: Contents) -> None:
    expected = contents(undisturbed)
    kill_at_random(folder, tmp_path / "store", expected, contents, workers=3, kills=4, seed=SEED)


@pytest.mark.slow
def test_many_kills(folder: Path, undisturbed: Path, tmp_path: Path, contents: Contents) -> None:
    expected = contents(undisturbed)
    kill_at_random(folder, tmp_path / "store", expected, contents, workers=8, kills=KILLS, seed=SEED + 1)


def test_a_unit_that_fails_is_named_and_the_others_finish(
    folder: Path, undisturbed: Path, tmp_path: Path, contents: Contents
) -> None:
    shutil.copytree(folder / "in", tmp_path / "in")
    bad = tmp_path / "in" / "05.jsonl"
    good = bad.read_bytes()
    bad.write_bytes(good[:-1] + b"}")
    run = {"tokenizer": folder / "tok", "out": tmp_path / "store", "unit_bytes": UNIT_BYTES, "engine": "hf"}
    for workers in (2, 1):
        with pytest.raises(
            DataError, match=r"1 of \d+ units failed, the others are finished; 0000\d-of-0000\d: .*05\.jsonl"
        ):
            prepare([tmp_path / "in"], workers=workers, **run)
    assert not (tmp_path / "store" / "manifest.json").exists()
    finished = {path: path.stat().st_mtime_ns for path in (tmp_path / "store" / "units").glob("0*/manifest.json")}
    assert len(finished) == len(list((undisturbed / "units").glob("0*"))) - 1
    bad.write_bytes(good)
    manifest = prepare([tmp_path / "in"], **run)
    assert manifest.documents == TokenStore(undisturbed).n_documents
    assert all(path.stat().st_mtime_ns == before for path, before in finished.items())
    shards = {name: data for name, data in contents(undisturbed).items() if name.endswith(".bin")}
    assert {n: d for n, d in contents(tmp_path / "store").items() if n.endswith(".bin")} == shards


def test_bad_input_is_left_out_by_the_next_call(folder: Path, tmp_path: Path, contents: Contents) -> None:
    """Units that were finished stay; the rest is that of a job which leaves bad input out from the beginning."""
    shutil.copytree(folder / "in", tmp_path / "in")
    bad = tmp_path / "in" / "05.jsonl"
    bad.write_bytes(bad.read_bytes()[:-1] + b"}\n" + b'{"text": "' + b"x" * 5000 + b'"}\n')
    options = {
        "tokenizer": folder / "tok",
        "engine": "hf",
        "unit_bytes": UNIT_BYTES,
        "options": SourceOptions(max_document_bytes=4000),
    }
    lenient = SourceOptions(max_document_bytes=4000, on_bad="skip")
    prepare([tmp_path / "in"], **{**options, "out": tmp_path / "skip", "options": lenient})
    run = {**options, "out": tmp_path / "store"}
    with pytest.raises(DataError, match=r"[1-9] of \d units failed"):
        prepare([tmp_path / "in"], **run)
    with pytest.raises(DataError, match=r"not all of its units are prepared and joined; run the same lt data prepare"):
        TokenStore(tmp_path / "store")
    finished = {path: path.stat().st_mtime_ns for path in (tmp_path / "store" / "units").glob("0*/manifest.json")}
    with pytest.raises(DataError, match="max_document_bytes was 4000 and is 3000"):
        prepare([tmp_path / "in"], **{**run, "options": SourceOptions(max_document_bytes=3000)})
    assert sum(prepare([tmp_path / "in"], **{**run, "options": lenient}).skipped.values()) > 1
    assert all(path.stat().st_mtime_ns == before for path, before in finished.items())
    found, expected = contents(tmp_path / "store"), contents(tmp_path / "skip")
    assert found.pop("units/plan.json") != expected.pop("units/plan.json")
    assert found == expected
    with pytest.raises(DataError, match=r"on_bad was skip and is error; choose another folder$"):
        prepare([tmp_path / "in"], **{**run, "out": tmp_path / "skip"})


def test_larger_documents_are_read_by_the_next_call(folder: Path, tmp_path: Path, contents: Contents) -> None:
    options = {"tokenizer": folder / "tok", "engine": "hf", "unit_bytes": UNIT_BYTES}
    run = {**options, "out": tmp_path / "store"}
    with pytest.raises(DataError, match=r"units failed.*line of more than 1500 bytes"):
        prepare([folder / "in"], options=SourceOptions(max_document_bytes=1500), **run)
    prepare([folder / "in"], options=SourceOptions(max_document_bytes=3000), **run)
    prepare([folder / "in"], options=SourceOptions(max_document_bytes=3000), out=tmp_path / "whole", **options)
    found, expected = contents(tmp_path / "store"), contents(tmp_path / "whole")
    assert found.pop("units/plan.json") != expected.pop("units/plan.json")
    assert found == expected


def test_units_without_any_document(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number in range(3):
        (tmp_path / f"in/{number}.jsonl").write_text('{"text": ""}\n', encoding="utf-8")
    run = {"tokenizer": folder / "tok", "out": tmp_path / "store", "engine": "hf", "unit_bytes": 5}
    for selection in (Selection(), Selection(drop_duplicates=True)):
        with pytest.raises(DataError, match=r"no text in any of the \d units \(3 empty\): check the sources"):
            prepare([tmp_path / "in"], selection=selection, **{**run, "out": tmp_path / str(selection.drop_duplicates)})
    assert not list(tmp_path.glob("*/manifest.json"))


def test_another_job_in_the_folder_is_refused(folder: Path, undisturbed: Path, tmp_path: Path) -> None:
    out = tmp_path / "store"
    shutil.copytree(undisturbed, out)
    run = {"tokenizer": folder / "tok", "out": out, "engine": "hf"}
    for changed in ({"unit_bytes": 20_000}, {"unit_bytes": UNIT_BYTES, "eos": False}):
        with pytest.raises(DataError, match="units of a job with other settings"):
            prepare([folder / "in"], **run, **changed)
    shutil.copytree(folder / "in", tmp_path / "in")
    (tmp_path / "in" / "07.jsonl").write_text('{"text": "longer than it was before"}\n' * 5, encoding="utf-8")
    with pytest.raises(DataError, match=r"units of a job with other settings: .*listing of the sources"):
        prepare([tmp_path / "in"], **run, unit_bytes=UNIT_BYTES)
    with pytest.raises(DataError, match="holds a token store already"):
        prepare([folder / "in"], **run)
    flat = tmp_path / "flat"
    prepare([folder / "in" / "00.jsonl"], **{**run, "out": flat})
    with pytest.raises(DataError, match="holds a token store already"):
        prepare([folder / "in"], **{**run, "out": flat}, unit_bytes=UNIT_BYTES)


@pytest.mark.parametrize("options", [{"overwrite": True}, {"num_parts": 2}, {"no_resume": True}])
def test_options_without_effect_are_refused(options: dict[str, object], folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no effect together with"):
        prepare([folder / "in"], tokenizer=folder / "tok", out=tmp_path / "store", unit_bytes=1000, **options)
    with pytest.raises(DataError, match="unit_bytes = 0, workers = 1: at least 1 each"):
        prepare([folder / "in"], tokenizer=folder / "tok", out=tmp_path / "store", unit_bytes=0)
    assert not (tmp_path / "store").exists()


def test_a_link_in_the_folder_of_units_is_not_followed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "units").symlink_to(tmp_path / "victim")
    with pytest.raises(DataError, match="a symbolic link"):
        prepare([folder / "in"], tokenizer=folder / "tok", out=tmp_path / "store", unit_bytes=UNIT_BYTES)
    assert not list((tmp_path / "victim").iterdir())


def test_sources_without_documents_in_some_units(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "in").mkdir()
    for number in range(4):
        line = '{"text": "something to encode"}\n' if number == 2 else '{"text": ""}\n'
        (tmp_path / f"in/{number}.jsonl").write_text(line * 20, encoding="utf-8")
    run = {"tokenizer": folder / "tok", "out": tmp_path / "store", "engine": "hf", "unit_bytes": 200}
    manifest = prepare([tmp_path / "in"], selection=Selection(min_characters=1), **run)
    assert manifest.documents == 20
    assert manifest.left_out.keys()
