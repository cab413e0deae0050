"""What a step read, against the streams that read it: through rewinds, resumes, epochs and other batch sizes."""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lt_data import (
    DataError,
    Document,
    RowReader,
    Stream,
    StreamState,
    Tokenizer,
    TokenStore,
    inspect_batch,
    inspect_step,
    pack,
    prepare,
)
from lt_data.__main__ import main
from lt_data.display.inspection_text import escape, parse_rows, quote_line
from lt_data.display.terminal import escape_controls

SEQ_LEN = 32


class Run:
    """A run directory as a trainer leaves it, and what each step really read, from the streams of all ranks."""

    def __init__(self, path: Path, reader: RowReader, store: str | Path) -> None:
        self.path, self.reader = path, reader
        path.mkdir()
        data = {
            "store": str(store),
            "seq_len": reader.seq_len,
            "packing": reader.pack.mode,
            "document_mask": reader.document_mask,
            "shuffle": True,
        }
        (path / "recipe.json").write_text(json.dumps({"recipe": {"data": data}, "origins": {}}), encoding="utf-8")
        (path / "events.jsonl").touch()
        self.read: dict[int, list[list[int]]] = {}
        self.batches: dict[int, list] = {}

    def write(self, name: str, **values: object) -> None:
        with open(self.path / name, "a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")

    def train(
        self, state: StreamState | None, n_steps: int, *, batch: int, dp_size: int, seed: int = 3, skip: int = 0
    ) -> StreamState:
        """Go on from a state; all that was read from its step on is read anew."""
        streams = [
            Stream(self.reader, global_batch_size=batch, dp_rank=rank, dp_size=dp_size, seed=seed, state=state)
            for rank in range(dp_size)
        ]
        for stream in streams:
            stream.skip(skip)
        begin = streams[0].state
        event = {**begin.to_dict(), "global_batch_size": batch, "dp_size": dp_size}
        self.write("events.jsonl", time="2026-01-01T00:00:00.000+00:00", event="data", **event)
        self.read = {step: rows for step, rows in self.read.items() if step <= begin.step}
        for step in range(begin.step + 1, begin.step + n_steps + 1):
            self.batches[step] = [stream.next() for stream in streams]
            self.read[step] = [batch.row_ids.tolist() for batch in self.batches[step]]
            self.write("metrics.jsonl", step=step, loss=1.0)
        return streams[0].state

    def check(self) -> None:
        """Each step reads what `inspect_step` says: rows, ranks, labels, and every token of every document."""
        tokenizer = self.reader.store.tokenizer()
        for step, of_ranks in self.read.items():
            report = inspect_step(self.path, step)
            assert report.recorded
            assert [row.index for row in report.rows] == list(range(report.event.global_batch_size))
            per_rank = report.event.global_batch_size // len(of_ranks)
            assert [[row.row for row in report.rows if row.rank == rank] for rank in range(len(of_ranks))] == of_ranks
            assert [row.rank for row in report.rows] == np.repeat(range(len(of_ranks)), per_rank).tolist()
            assert sum(row.labels for row in report.rows) == self.batches[step][0].valid_tokens
            assert [row.position for row in report.rows] == list(
                range(report.first_position, report.first_position + report.event.global_batch_size)
            )
            for row in report.rows:
                assert row.epoch == row.position // self.reader.n_rows
                rows = self.batches[step][row.rank].rows
                ids, documents = (array[row.index % per_rank] for array in (rows.input_ids, rows.doc_ids))
                assert row.padding == int((documents < 0).sum())
                assert len(row.spans) == documents.max() + 1
                for number, piece in enumerate(row.spans):
                    tokens = ids[documents == number]
                    assert tokens.tolist() == self.reader.store[piece.document][piece.begin : piece.end].tolist()
                    assert piece.text == tokenizer.decode(tokens)
                    assert piece.document_tokens == len(self.reader.store[piece.document])
                assert sum(piece.labels for piece in row.spans) == row.labels


@pytest.fixture
def reader(store: TokenStore) -> RowReader:
    return RowReader(store, pack(store, seq_len=SEQ_LEN))


@pytest.fixture
def run(tmp_path: Path, reader: RowReader) -> Run:
    return Run(tmp_path / "run", reader, reader.store.path)


def test_every_step_of_a_run_that_was_stopped_rewound_and_resumed(run: Run, reader: RowReader) -> None:
    start = run.train(None, 3, batch=8, dp_size=2)
    run.check()
    further = run.train(start, 4, batch=12, dp_size=4)  # other ranks and another batch size
    run.check()
    run.train(start, 2, batch=8, dp_size=1, skip=30)  # back to the end of step 3, over rows that did harm
    run.check()
    assert sorted(run.read) == [1, 2, 3, 4, 5]
    assert inspect_step(run.path, 4).event.skipped == ((24, 54),)
    run.train(replace(further, step=4), 3, batch=6, dp_size=2)  # from an older checkpoint of the same step 4
    run.check()
    n_rows = reader.n_rows
    border = replace(start, row=n_rows - 5, step=7)
    run.train(border, 3, batch=4, dp_size=2)
    run.check()
    epochs = [row.epoch for row in inspect_step(run.path, 9).rows]
    assert epochs == [0, 1, 1, 1], "the step goes over the border of the epochs"
    assert [row.position for row in inspect_step(run.path, 9).rows] == [n_rows - 1, n_rows, n_rows + 1, n_rows + 2]


@pytest.mark.parametrize("mode", ["bfd", "concat"])
@pytest.mark.parametrize("document_mask", [True, False])
def test_each_kind_of_pack(tmp_path: Path, store: TokenStore, mode: str, document_mask: bool) -> None:
    index = pack(store, seq_len=SEQ_LEN, mode=mode)  # pyright: ignore[reportArgumentType]
    reader = RowReader(store, index, document_mask=document_mask)
    stream = Stream(reader, global_batch_size=reader.n_rows)
    before = stream.state
    rows = inspect_batch(stream)
    assert stream.state == before
    # Every token of every document once, and the documents in their order within a row.
    seen = sorted((piece.document, piece.begin, piece.end) for row in rows for piece in row.spans)
    for document in range(store.n_documents):
        parts = [part[1:] for part in seen if part[0] == document]
        assert [part[0] for part in parts] == [0, *(part[1] for part in parts[:-1])]
        assert parts[-1][1] == store.lengths[document]
    assert sum(piece.has_start for row in rows for piece in row.spans) == store.n_documents
    assert sum(piece.has_end for row in rows for piece in row.spans) == store.n_documents
    assert [row.labels for row in rows] == reader.valid[[row.row for row in rows]].tolist()
    run = Run(tmp_path / "run", reader, store.path)
    run.train(None, 1, batch=4, dp_size=2)
    assert [row.row for row in inspect_step(run.path, 1).rows] == [row for of_rank in run.read[1] for row in of_rank]


def test_text_that_a_border_cuts_inside_a_character(tmp_path: Path, tokenizer: Tokenizer) -> None:
    text = "🦊東京ß" * 40
    prepare([Document(text=text, source="")], tokenizer=tokenizer, out=tmp_path / "store", bos=False)
    store = TokenStore(tmp_path / "store")
    reader = RowReader(store, pack(store, seq_len=3, mode="concat"))
    rows = inspect_batch(Stream(reader, global_batch_size=reader.n_rows, shuffle=False))
    texts = [piece.text for row in rows for piece in row.spans]
    assert any("\ufffd" in part for part in texts), "no border cut a character"
    assert any("\ufffd" not in part for part in texts)
    assert texts[-1].endswith("<|eos|>")
    for part in texts:
        assert "\n" not in quote_line(part, 40)


def test_a_step_that_has_not_been_run(run: Run) -> None:
    run.train(None, 3, batch=4, dp_size=2)
    report = inspect_step(run.path, 5)
    assert (report.recorded, report.last_recorded) == (False, 3)
    stream = Stream(run.reader, global_batch_size=4, seed=3)
    assert [row.row for row in report.rows] == stream.global_rows(stream.state, 20)[16:].tolist()
    assert inspect_step(run.path, 3).recorded
    run.write("events.jsonl", event="checkpoint", step=5, path="x")
    assert inspect_step(run.path, 5).recorded
    assert not inspect_step(run.path, 6).recorded


def test_a_step_before_a_later_start_was_run_though_no_metrics_tell(run: Run) -> None:
    state = run.train(None, 3, batch=4, dp_size=1)
    (run.path / "metrics.jsonl").unlink()
    assert not inspect_step(run.path, 3).recorded
    run.train(state, 0, batch=4, dp_size=1)
    assert inspect_step(run.path, 3).recorded
    assert not inspect_step(run.path, 4).recorded


def test_rows_can_be_chosen(run: Run) -> None:
    run.train(None, 2, batch=6, dp_size=3)
    whole = inspect_step(run.path, 2).rows
    assert inspect_step(run.path, 2, rows=range(2, 4)).rows == whole[2:4]
    assert inspect_step(run.path, 2, rows=[5, 0]).rows == (whole[5], whole[0])
    for wrong in ([6], [-1]):
        with pytest.raises(DataError, match=rf"row {wrong[0]}: the batch has the rows 0 to 5"):
            inspect_step(run.path, 2, rows=wrong)


def test_the_store_may_have_moved(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = json.loads((run.path / "recipe.json").read_bytes())
    recipe["recipe"]["data"]["store"] = "store"
    (run.path / "recipe.json").write_text(json.dumps(recipe), encoding="utf-8")
    run.train(None, 1, batch=2, dp_size=1)
    monkeypatch.chdir(tmp_path)
    assert inspect_step("run", 1).store == Path("store")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(DataError) as caught:
        inspect_step(run.path, 1)
    text = str(caught.value)
    assert text.startswith("cannot read the token store's store/manifest.json: No such file or directory")
    assert f"{run.path}/recipe.json has data.store = 'store', relative to the working directory" in text
    assert text.endswith("give the store's folder with --store")
    assert inspect_step(run.path, 1, store=tmp_path / "store").rows
    with pytest.raises(DataError, match=r"manifest\.json: No such file or directory; check the path$"):
        inspect_step(run.path, 1, store=tmp_path / "nowhere")


def test_other_data_than_the_run_read_are_refused_and_what_differs_is_named(
    run: Run, tmp_path: Path, documents: list[Document], tokenizer: Tokenizer
) -> None:
    run.train(None, 1, batch=2, dp_size=1)
    prepare(documents[1:], tokenizer=tokenizer, out=tmp_path / "other")
    pack(TokenStore(tmp_path / "other"), seq_len=SEQ_LEN)
    with pytest.raises(
        DataError, match=r"other: not the rows that step 1 of .*run read \(store: \w+ before, \w+ now; "
    ):
        inspect_step(run.path, 1, store=tmp_path / "other")
    recipe = json.loads((run.path / "recipe.json").read_bytes())
    for name, value, message in (
        ("document_mask", False, "document_mask: on before, off now"),
        ("shuffle", False, "order: shuffled-1 before, pack now"),
        ("packing", "concat", r"pack: bfd-32:\w+ before, concat-32:\w+ now"),
    ):
        pack(run.reader.store, seq_len=SEQ_LEN, mode="concat")
        changed = {"recipe": {"data": {**recipe["recipe"]["data"], name: value}}}
        (run.path / "recipe.json").write_text(json.dumps(changed), encoding="utf-8")
        with pytest.raises(DataError, match=rf"\({message}\); give the run's store with --store"):
            inspect_step(run.path, 1)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"run: not a run directory \(no recipe\.json\)"),
        ({"recipe.json": "{"}, r"recipe\.json: not JSON"),
        ({"recipe.json": "[]"}, r"recipe\.json: holds a list, not an object"),
        ({"recipe.json": '{"recipe": {}}'}, r"recipe\.json: not the recipe of a run \(KeyError: 'data'\)"),
        (
            {
                "recipe.json": '{"recipe": {"data": {"store": "x", "seq_len": true, "packing": "bfd", '
                '"document_mask": true, "shuffle": true}}}'
            },
            r"data\.seq_len is True",
        ),
    ],
)
def test_what_is_no_run_directory(tmp_path: Path, files: dict[str, str], message: str) -> None:
    (tmp_path / "run").mkdir()
    for name, text in files.items():
        (tmp_path / "run" / name).write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        inspect_step(tmp_path / "run", 1)


EVENT = {"event": "data", "step": 0, "row": 0, "global_batch_size": 2, "dp_size": 1, "seed": 3, "fingerprint": "x"}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], r"events\.jsonl: no data event before step 1, .* the run has not started to train"),
        ([json.dumps({"event": "start"})], "no data event before step 1"),
        ([json.dumps({**EVENT, "step": 1})], "no data event before step 1"),
        (["{", json.dumps(EVENT)], r"events\.jsonl:1: not JSON \(.*\); remove the line"),
        ([json.dumps(EVENT), "[1]"], r"events\.jsonl:2: holds a list, not an object; remove the line"),
        *(
            ([json.dumps({**EVENT, **change})], r"events\.jsonl:1: not a data event of this version")
            for change in (
                {"step": "0"},
                {"row": -1},
                {"global_batch_size": 0},
                {"seed": True},
                {"dp_size": None},
                {"fingerprint": 1},
                {"skipped": [[1]]},
                {"skipped": 5},
            )
        ),
    ],
)
def test_events_that_say_nothing_or_are_damaged(run: Run, lines: list[str], message: str) -> None:
    (run.path / "events.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    with pytest.raises(DataError, match=message):
        inspect_step(run.path, 1)


def test_the_torn_last_line_of_a_killed_run_is_left_out(run: Run) -> None:
    run.train(None, 2, batch=2, dp_size=1)
    for name in ("events.jsonl", "metrics.jsonl"):
        with open(run.path / name, "ab") as file:
            file.write(b'{"event": "data", "step": 0, "ro')
    run.check()


def test_steps_are_counted_from_1(run: Run) -> None:
    run.train(None, 2, batch=2, dp_size=1)
    for step in (0, -1):
        with pytest.raises(DataError, match=f"step = {step}: the first step of a run is 1"):
            inspect_step(run.path, step)


# The command.


@pytest.fixture
def command(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., tuple[int, str, str]]]:
    run.train(None, 3, batch=4, dp_size=2)
    monkeypatch.setenv("COLUMNS", "60")

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["lt-data", "inspect", "--run", str(run.path), *map(str, arguments)])
        code = main()
        assert code is None or isinstance(code, int)
        return code or 0, *capsys.readouterr()

    return call


def test_the_command_shows_rows_documents_and_how_their_text_begins(
    command: Callable[..., tuple[int, str, str]], run: Run
) -> None:
    code, out, err = command("--step", 2)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "step 2: positions 4 to 7, 4 rows over 2 data-parallel ranks, seed 3"
    assert lines[1] == f"store {run.reader.store.path}: {run.reader.fingerprint} order:shuffled-1"
    report = inspect_step(run.path, 2)
    heads = [line for line in lines if line.startswith("row ")]
    assert [head.partition(" labels")[0] for head in heads] == [
        f"row {row.index}: position {4 + row.index}, epoch 0, pack row {row.row}, rank {row.index // 2}, {row.labels}"
        for row in report.rows
    ]
    pieces = [piece for row in report.rows for piece in row.spans]
    shown = [(line, text) for line, text in pairwise(lines) if line.startswith("  document ")]
    assert len(shown) == len(pieces)
    extents = {(True, True): "whole", (True, False): "its beginning", (False, True): "its end"}
    for piece, (line, text) in zip(pieces, shown, strict=True):
        extent = extents.get((piece.has_start, piece.has_end), "from its middle")
        assert line == (
            f"  document {piece.document}: tokens {piece.begin} to {piece.end - 1} of {piece.document_tokens}, "
            f"{extent}, {piece.labels} labels"
        )
        assert text == f"    {quote_line(piece.text, 56)}"
    code, one, _ = command("--step", 2, "--row", 3)
    assert one.splitlines()[3:] == lines[lines.index(heads[3]) :]
    assert command("--step", 2, "--rows", "3:4") == (0, one, "")


def test_the_whole_text(command: Callable[..., tuple[int, str, str]], run: Run) -> None:
    code, out, _ = command("--step", 1, "--full-text")
    assert code == 0
    pieces = [piece for row in inspect_step(run.path, 1).rows for piece in row.spans]
    quoted = "".join(f"{line[6:]}\n" for line in out.splitlines() if line.startswith("    | "))
    assert quoted == "".join(escape_controls(piece.text) + "\n" for piece in pieces)
    assert "\\r" in quoted
    assert "\r" not in out


def test_json_is_one_document_with_everything(command: Callable[..., tuple[int, str, str]], run: Run) -> None:
    code, out, _ = command("--step", 3, "--rows", "1:3", "--json")
    assert code == 0
    out.encode("ascii")
    values = json.loads(out)
    report = inspect_step(run.path, 3, rows=range(1, 3))
    assert values == report.to_dict()
    assert (values["first_position"], values["global_batch_size"], values["recorded"]) == (8, 4, True)
    assert [row["position"] for row in values["rows"]] == [9, 10]
    piece = report.rows[0].spans[0]
    assert values["rows"][0]["spans"][0] == {
        "document": piece.document,
        "source": None,
        "begin": piece.begin,
        "end": piece.end,
        "document_tokens": piece.document_tokens,
        "labels": piece.labels,
        "columns": {},
        "text": piece.text,
        "has_start": piece.begin == 0,
        "has_end": piece.end == piece.document_tokens,
    }


def test_the_command_says_that_a_step_has_not_been_run(command: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = command("--step", 4)
    assert code == 0
    assert out.startswith(
        "step 4 is not recorded in the run's files (their last step is 3); if the run continues as it was last "
        "started, it would read:\nstep 4: positions 12 to 15, "
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--step", "0"), "error: step = 0: the first step of a run is 1\n"),
        (("--step", "1", "--row", "4"), "error: row 4: the batch has the rows 0 to 3\n"),
        (("--step", "1", "--row", "1", "--rows", "1:2"), "error: --row and --rows: give only one of them\n"),
        (("--step", "1", "--rows", "2:2"), "error: --rows 2:2: give two numbers A:B, A less than B"),
        (("--step", "1", "--rows", "2"), "error: --rows 2: give two numbers"),
        (("--step", "1", "--rows", "-1:2"), "error: --rows -1:2: give two numbers"),
    ],
)
def test_mistakes_of_the_user_are_one_line_and_64(
    command: Callable[..., tuple[int, str, str]], arguments: tuple[str, ...], message: str
) -> None:
    code, out, err = command(*arguments)
    assert (code, out, err.count("\n")) == (64, "", 1)
    assert err.startswith(message)


def test_rows_that_are_asked_for() -> None:
    assert parse_rows(None, None) is None
    assert parse_rows(3, None) == range(3, 4)
    assert parse_rows(None, "2:5") == range(2, 5)


@pytest.mark.parametrize(
    ("text", "columns", "shown"),
    [
        ("fox", 5, '"fox"'),
        ("foxes", 7, '"foxes"'),
        ("foxes!", 7, '"fo"...'),
        ("", 5, '""'),
        ('a "b"\\c\n\t\x1b[31m\u2028\ufeffz', 99, r'"a \"b\"\\c\n\t\x1b[31m\u2028\ufeffz"'),
        ("東京東京", 10, '"東京東京"'),
        ("東京東京", 9, '"東京"...'),
        ("e\u0301" * 3, 5, '"' + "e\u0301" * 3 + '"'),
        ("ab\ncd", 7, '"ab"...'),
        ("🦊🦊🦊", 8, '"🦊🦊🦊"'),
    ],
)
def test_one_line(text: str, columns: int, shown: str) -> None:
    assert quote_line(text, columns) == shown


@given(st.text(), st.integers(5, 60))
def test_one_line_is_one_printable_line_of_the_width(text: str, columns: int) -> None:
    shown = quote_line(text, columns)
    assert shown.isprintable()
    assert escape(text).isprintable()
    assert shown.startswith('"')
    if text.isascii():
        assert len(shown) <= columns
    assert escape(text).encode("utf-8", "backslashreplace").decode("utf-8").count("\n") == 0
