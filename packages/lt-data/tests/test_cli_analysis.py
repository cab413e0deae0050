"""The commands that analyze a store, on terminals with and without color."""

import json
import re
import sys
from collections.abc import Callable
from itertools import pairwise

import pytest

from lt_data import TokenStore, pack
from lt_data.__main__ import main
from lt_data.display.color import should_use_color

Run = Callable[..., tuple[int, str, str]]
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["lt-data", *map(str, arguments)])
        code = main()
        assert code is None or isinstance(code, int)
        return code or 0, *capsys.readouterr()

    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    return call


def test_rows_of_a_store(store: TokenStore, run: Run) -> None:
    index = pack(store, seq_len=128)
    code, plain, _ = run("inspect", store.path, "--rows", "2:5", "--full-text")
    assert code == 0
    assert "\x1b" not in plain
    heads = re.findall(r"^row (\d+), (\d+) labels", plain, re.M)
    assert heads == [(str(row), str(int(index.valid[row]))) for row in (2, 3, 4)]
    spans = re.findall(r"document (\d+): tokens (\d+) to (\d+) of", plain)
    slices = range(int(index.row_offsets[2]), int(index.row_offsets[5]))
    assert [int(document) for document, _, _ in spans] == [int(index.document[i]) for i in slices]
    for (document, begin, end), i in zip(spans, slices, strict=True):
        first = int(store.offsets[int(document)])
        assert (first + int(begin), first + int(end) + 1 - first - int(begin)) == (
            int(index.start[i]),
            int(index.length[i]),
        )
    code, colored, _ = run("inspect", store.path, "--rows", "2:5", "--full-text", "--color")
    assert code == 0
    assert ESCAPE.sub("", colored) == plain, "colors add nothing but colors"
    colors = re.findall(r"^  \x1b\[(\d+)mdocument", colored, re.M)
    assert len(colors) == len(spans)
    row = re.split(r"\n\n\x1b\[1mrow", colored)[0]
    of_row = re.findall(r"^  \x1b\[(\d+)mdocument", row, re.M)
    assert all(one != two for one, two in pairwise(of_row)), "neighbors differ"


def test_four_rows_unless_told(store: TokenStore, run: Run) -> None:
    pack(store, seq_len=128)
    assert len(re.findall(r"^row ", run("inspect", store.path)[1], re.M)) == 4
    found = json.loads(run("inspect", store.path, "--row", 1, "--json")[1])
    assert [row["row"] for row in found] == [1]


def test_which_pack(store: TokenStore, run: Run) -> None:
    assert "has no pack; make one with: lt data pack" in run("inspect", store.path)[2]
    pack(store, seq_len=64)
    pack(store, seq_len=64, mode="concat")
    code, _, err = run("steps-per-epoch", store.path, "--global-batch-size", 4)
    assert code == 64
    assert "has several packs (bfd-64, concat-64); give --seq-len and --mode" in err
    assert "no pack with --seq-len 32" in run("inspect", store.path, "--seq-len", 32)[2]
    rows = pack(store, seq_len=64).n_rows
    command = ("steps-per-epoch", store.path, "--global-batch-size", 8, "--dp-size", 4, "--mode", "bfd")
    code, out, _ = run(*command)
    assert code == 0
    assert out.startswith(f"{rows} rows of 64 tokens = {rows // 8} steps of 8 rows (2 for each of 4 ranks, 512 tokens)")
    (found,) = json.loads(run(*command, "--json")[1])
    assert (found["steps"], found["remainder"], found["rows_per_rank"]) == (rows // 8, rows % 8, 2)


@pytest.mark.parametrize(
    "arguments", [(), ("--run", "x"), ("store", "--run", "x", "--step", 1), ("store", "--step", 1), ("--row", 99999)]
)
def test_arguments_that_do_not_go_together(arguments: tuple[object, ...], store: TokenStore, run: Run) -> None:
    pack(store, seq_len=64)
    words = [store.path if word == "store" else word for word in arguments]
    if words[:1] == ["--row"]:
        words = [store.path, *words]
    code, out, err = run("inspect", *words)
    assert (code, out) == (64, "")
    assert err.startswith("error: ")


def test_who_gets_colors(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert should_use_color()
    monkeypatch.setenv("TERM", "dumb")
    assert not should_use_color()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    assert not should_use_color()
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert should_use_color()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not should_use_color()
    assert should_use_color(True)


def test_the_report(store: TokenStore, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(store.path.parent)
    pack(store, seq_len=64)
    code, out, _ = run("report", store.path, "--global-batch-size", 4)
    assert (code, out) == (0, "report.html\n")
    assert "steps of 4 rows" in (store.path.parent / "report.html").read_text(encoding="utf-8")
    assert run("report", store.path)[0] == 64


def test_stats_with_everything(store: TokenStore, run: Run) -> None:
    pack(store, seq_len=64)
    code, out, _ = run("stats", store.path, "--duplicates", "--global-batch-size", 4, "--dp-size", 2)
    assert code == 0
    assert "exact duplicates     0 documents, 0 tokens" in out
    assert "steps of 4 rows (2 for each of 2 ranks" in out
