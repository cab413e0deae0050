"""Documents of rows, against the streams and stores that hold them, and how the command shows them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lt_data import DataError, Document, Mixture, RowReader, Stream, TokenStore, pack, prepare
from lt_data.analysis.inspection import inspect_batch, inspect_document, inspect_rows
from lt_data.display.inspection_text import escape, quote_line


@pytest.mark.parametrize("mode", ["bfd", "concat"])
def test_each_rank_reads_what_is_inspected(store, mode):
    reader = RowReader(store, pack(store, seq_len=32, mode=mode))  # pyright: ignore[reportArgumentType]
    source = Mixture({"a": reader, "b": reader}, {"a": 2, "b": 1})
    tokenizer = store.tokenizer()
    options = {"global_batch_size": 12, "micro_batch_size": 2, "seed": 3}
    ranks = [Stream(source, dp_rank=rank, dp_size=3, **options) for rank in range(3)]
    for _ in range(-(-2 * reader.n_rows // 12)):
        found, before = inspect_batch(ranks[0]), ranks[0].state
        batches = [stream.next() for stream in ranks]
        assert inspect_batch(Stream(source, global_batch_size=12, seed=3, state=before), [5, 0])[1] == found[0]
        assert [row.rank for row in found] == [0, 0, 1, 1, 2, 2] * 2
        assert [row.position for row in found] == list(range(before.row, before.row + 12))
        assert sum(row.labels for row in found) == batches[0].valid_tokens
        assert [row.epoch for row in found] == source.epochs_at(before.row, 12).tolist()
        for row in found:
            rows, place = batches[row.rank].rows, row.index // 6 * 2 + row.index % 2
            number = int(batches[row.rank].row_ids[place])
            assert (row.origin, row.row) == ("ab"[number // reader.n_rows], number % reader.n_rows)
            ids, owners = rows.input_ids[place], rows.doc_ids[place]
            assert row.padding == int((owners < 0).sum())
            assert sum(span.labels for span in row.spans) == row.labels == int(rows.loss_mask[place].sum())
            assert len(row.spans) == owners.max() + 1
            for i, span in enumerate(row.spans):
                document = store[span.document]
                assert ids[owners == i].tolist() == document[span.begin : span.end].tolist()
                assert span.text == tokenizer.decode(document[span.begin : span.end])
                assert span.document_tokens == len(document)
                edges = (span.begin == 0, span.end == len(document))
                words = {(True, True): "whole", (True, False): "its beginning", (False, True): "its end"}
                assert span.describe() == words.get(edges, "from its middle")


def test_rows_of_a_pack_and_single_documents(store):
    index = pack(store, seq_len=64)
    rows = inspect_rows(store, index, [3, 0])
    assert [(row.row, row.index, row.labels) for row in rows] == [(n, n, int(index.valid[n])) for n in (3, 0)]
    document = inspect_document(store, 7)
    assert (document.begin, document.end, document.text) == (0, len(store[7]), store.tokenizer().decode(store[7]))
    for call, message in (
        (lambda: inspect_rows(store, index, [index.n_rows]), f"row {index.n_rows}: the pack has the rows 0 to"),
        (lambda: inspect_document(store, -1), "document -1: the store has the documents 0 to"),
        (lambda: inspect_batch(Stream(RowReader(store, index), global_batch_size=2), [2]), "the batch has the rows"),
    ):
        with pytest.raises(DataError, match=message):
            call()


def test_the_command(store, run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert "has no pack; make one with: lt data pack" in run("inspect", store.path)[2]
    rows = inspect_rows(store, pack(store, seq_len=64), range(4))
    code, out, _ = run("inspect", store.path)
    heads = [line.split(" labels")[0] for line in out.splitlines() if line.startswith("row ")]
    assert (code, heads) == (0, [f"row {row.row}, {row.labels}" for row in rows])
    lines = [line for line in out.splitlines() if line.startswith("  document")]
    spans = [span for row in rows for span in row.spans]
    assert lines == [
        f"  document {span.document}: tokens {span.begin} to {span.end - 1} of {span.document_tokens}, "
        f"{span.describe()}, {span.labels} labels"
        for span in spans
    ]
    assert f'    "{quote_line(spans[0].text, 54)}"\n' in out
    full = run("inspect", store.path, "--full-text")[1]
    shown = "".join(f"{line[6:]}\n" for line in full.splitlines() if line.startswith("    | "))
    assert shown.replace("\\r", "\r") == "".join(f"{span.text}\n" for span in spans)
    assert json.loads(run("inspect", store.path, "--rows", "1:3", "--json")[1]) == json.loads(
        json.dumps([row.to_dict() for row in rows[1:3]])
    )
    assert json.loads(run("inspect", store.path, "--document", 3, "--json")[1])["document"] == 3
    pack(store, seq_len=64, mode="concat")
    for options, message in (
        ((), "several packs of these; there are bfd-64, concat-64: give --seq-len and --mode"),
        (("--seq-len", 32), "no pack of these"),
        (("--mode", "bfd", "--row", 99999), "row 99999: the pack has the rows 0 to"),
        (("--document", 1, "--row", 1), "--document: not with"),
        (("--row", 1, "--rows", "1:2"), "--row and --rows: give only one of them"),
        (("--rows", "2:2"), "--rows 2:2: give two numbers A:B, A less than B"),
    ):
        code, out, err = run("inspect", store.path, *options)
        assert (code, out, err.count("\n")) == (64, "", 1)
        assert message in err


def test_text_that_a_border_cuts_inside_a_character(tmp_path, tokenizer):
    document = Document(text="🦊東京ß" * 40, source="")
    prepare([document], tokenizer=tokenizer, out=tmp_path / "store", bos=False)
    store = TokenStore(tmp_path / "store")
    index = pack(store, seq_len=3, mode="concat")
    texts = [span.text for row in inspect_rows(store, index, range(index.n_rows)) for span in row.spans]
    assert len({"\ufffd" in text for text in texts}) == 2


@given(st.text(), st.integers(5, 60))
def test_one_printable_line_of_the_width(text, columns):
    shown = quote_line(text, columns)
    assert shown.isprintable()
    assert len(shown) <= columns
    assert shown == escape(text) if len(escape(text)) <= columns else shown.endswith("...")
