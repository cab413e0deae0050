"""What becomes of bad input: an error with file and line, or, by option, left out and counted. Never a silent loss."""

import gzip
import hashlib
import io
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lt_data import DataError, DocumentReader, SourceOptions, read_documents

GOOD = b'{"text": "good"}\n'


def zstandard_of(content: bytes) -> bytes:
    zstandard = pytest.importorskip("zstandard", reason="zstandard is not installed")
    return zstandard.ZstdCompressor(write_checksum=True).compress(content)


def parquet_of(columns: dict[str, Any], **options: Any) -> bytes:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    import pyarrow.parquet

    out = io.BytesIO()
    pyarrow.parquet.write_table(pa.table(columns), out, **options)
    return out.getvalue()


def stream_of(texts: list[str], rows: int) -> bytes:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    out = io.BytesIO()
    table = pa.table({"text": texts})
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return out.getvalue()


@pytest.mark.parametrize(
    ("line", "reason", "message"),
    [
        (b'{"text": "b"', "broken JSON line", r"not a JSON value: .*correct or remove the line"),
        (b'{"text": "b"} {}', "broken JSON line", "not a JSON value: Extra data"),
        (b"[" * 100_000, "broken JSON line", "not a JSON value"),
        (b'{"text": "b", "n": ' + b"9" * 5000 + b"}", "broken JSON line", "not a JSON value"),
        (b'\xef\xbb\xbf{"text": "b"}', "broken JSON line", "not a JSON value"),  # a mark in the midst of a file
        (b'{"text": "\xff"}', "not UTF-8", "not UTF-8 at byte 10"),
        (b'{"text": "\xed\xa0\x80"}', "not UTF-8", "not UTF-8 at byte 10"),  # half of a pair in three bytes
        (b'{"text": "a\\ud83d"}', "half of a surrogate pair", "character 1 is half of a surrogate pair"),
        (b'{"text": "\\uDE00\\ud83d"}', "half of a surrogate pair", "character 0 is half of a surrogate pair"),
        (b"[1]", "not a record", r"no field 'text' \(found list\)"),
        (b'{"Text": "b", "id": 1}', "no field 'text'", r"no field 'text' \(found fields 'Text', 'id'\)"),
        (
            b'{"input_ids": [1]}',
            "no field 'text'",
            r".*name the field with text_field \(--text-field\); "
            r"for the ids in 'input_ids' give tokens_field='input_ids' \(--tokens-field input_ids\)",
        ),
        (b'{"text": null}', "null", "field 'text' is null"),
    ],
)
@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
def test_bad_lines(tmp_path: Path, line: bytes, reason: str, message: str, packed: str) -> None:
    path = tmp_path / f"x.jsonl{packed}"
    content = GOOD + line + b"\n" + GOOD + line
    path.write_bytes({"": bytes, ".gz": gzip.compress, ".zst": zstandard_of}[packed](content))
    with pytest.raises(DataError, match=rf"x\.jsonl{packed}:2: {message}.*give on_bad='skip' \(--on-bad skip\)$"):
        list(read_documents([path]))
    reader = DocumentReader([path], SourceOptions(on_bad="skip"))
    assert [(d.text, d.next_record, d.source) for d in reader] == [("good", 1, f"{path}:1"), ("good", 3, f"{path}:3")]
    assert reader.skipped == {reason: 2}
    assert list(reader.skip_examples) == [reason]
    assert reader.skip_examples[reason].startswith(f"{path}:2: ")
    assert [d.next_record for d in reader.documents_from(0, 2)] == [3]
    assert reader.skipped == {reason: 1}
    assert reader.source_files().bytes == path.stat().st_size


@pytest.mark.parametrize("value", ["3", '"1 2"', "[1, -1]", "[1.0]", "[true]", "[2147483648]", "[[1]]", "[null]"])
def test_bad_ids(tmp_path: Path, value: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(f'{{"input_ids": [1]}}\n{{"input_ids": {value}}}\n{{"input_ids": [2]}}\n')
    with pytest.raises(DataError, match=r"x\.jsonl:2: field 'input_ids' is not a list of whole numbers from 0 to"):
        list(read_documents([path], SourceOptions(tokens_field="input_ids")))
    reader = DocumentReader([path], SourceOptions(tokens_field="input_ids", on_bad="skip"))
    assert [d.ids.tolist() for d in reader if d.ids is not None] == [[1], [2]]
    assert reader.skipped == {"not a list of ids": 1}


def test_the_highest_id(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(f'{{"tokens": [0, {2**31 - 1}]}}')
    (tmp_path / "x.parquet").write_bytes(parquet_of({"tokens": [[0, 2**31 - 1]]}))
    found = [d.ids for d in read_documents([tmp_path], SourceOptions(tokens_field="tokens"))]
    assert [ids.tolist() for ids in found if ids is not None] == [[0, 2**31 - 1]] * 2


def test_bad_ids_in_columns(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    columns = {
        "null": pa.array([[1], None, [2]]),
        "nulls": pa.array([[1], [3, None], [2]]),
        "negative": pa.array([[1], [-1], [2]]),
        "big": pa.array([[1], [2**63], [2]], pa.list_(pa.uint64())),
        "just too big": pa.array([[1], [7, 2**31], [2]]),
        "float": pa.array([[1.0], [2.0], [2.0]]),
        "text": pa.array(["1", "2", "3"]),
        "number": pa.array([1, 2, 3]),
    }
    for name, column in columns.items():
        path = tmp_path / f"{name}.parquet"
        path.write_bytes(parquet_of({"tokens": column}))
        reader = DocumentReader([path], SourceOptions(tokens_field="tokens", on_bad="skip"))
        kept = [d.ids.tolist() for d in reader if d.ids is not None]
        all_bad = name in ("float", "text", "number")
        reason = "null" if name == "null" else "not a list of ids"
        assert (kept, reader.skipped) == ([] if all_bad else [[1], [2]], {reason: 3 if all_bad else 1})
        said = reason.removesuffix(" of ids")
        message = rf"{name}\.parquet#{1 if all_bad else 2}: field 'tokens' is {said}.*\(--on-bad skip\)$"
        with pytest.raises(DataError, match=message):
            list(read_documents([path], SourceOptions(tokens_field="tokens")))


def test_bad_strings_in_columns(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    binary = pa.array([b"good", b"\xff", None, b"good"], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 4, binary.buffers())
    path = tmp_path / "x.parquet"
    path.write_bytes(parquet_of({"text": text}))
    with pytest.raises(DataError, match=r"x\.parquet#2: not UTF-8 at byte 0"):
        list(read_documents([path]))
    reader = DocumentReader([path], SourceOptions(on_bad="skip"))
    assert [(d.text, d.next_record) for d in reader] == [("good", 1), ("good", 4)]
    assert reader.skipped == {"not UTF-8": 1, "null": 1}
    path.write_bytes(parquet_of({"text": list(range(300)), "n": list(range(300))}))
    with pytest.raises(DataError, match=r"x\.parquet#1: field 'text' holds int64, not a string"):
        list(read_documents([path]))
    reader = DocumentReader([path], SourceOptions(on_bad="skip"))
    assert list(reader) == []
    assert reader.skipped == {"not a string": 300}


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_table_without_the_column(tmp_path: Path, suffix: str) -> None:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    path = tmp_path / f"x{suffix}"
    if suffix == ".parquet":
        path.write_bytes(parquet_of({"body": ["a", "b"], "tokens": [[1], [2]]}))
    else:
        with pa.OSFile(str(path), "wb") as out, pa.ipc.new_stream(out, pa.schema([("body", "string")])) as writer:
            writer.write_batch(pa.record_batch({"body": ["a"]}))
            writer.write_batch(pa.record_batch({"body": ["b"]}))
    with pytest.raises(DataError, match=rf"x{suffix}#1: no field 'text' \(found fields 'body'"):
        list(read_documents([path]))
    reader = DocumentReader([path], SourceOptions(on_bad="skip"))
    assert list(reader) == []
    assert reader.skipped == {"no field 'text'": 2}
    assert list(reader.documents_from(0, 1)) == []
    assert reader.skipped == {"no field 'text'": 1}


def packed_kinds() -> dict[str, tuple[bytes, str]]:
    content = b"".join(b'{"text": "%d"}\n' % i for i in range(3000))
    texts = [str(i) for i in range(3000)]
    return {
        "x.jsonl.gz": (gzip.compress(content), "truncated gzip|damaged gzip"),
        "x.jsonl.zst": (zstandard_of(content), "truncated zstandard|damaged zstandard"),
        "x.txt.gz": (gzip.compress(content), "truncated gzip|damaged gzip"),
        "x.parquet": (parquet_of({"text": texts}, row_group_size=500), "damaged parquet file"),
        "x.arrow": (stream_of(texts, 1000), "truncated arrow|damaged arrow"),
    }


@pytest.mark.parametrize("kind", ["x.jsonl.gz", "x.jsonl.zst", "x.txt.gz", "x.parquet", "x.arrow"])
def test_a_file_that_is_cut_off_anywhere_is_an_error(tmp_path: Path, kind: str) -> None:
    whole, message = packed_kinds()[kind]
    path = tmp_path / kind
    (tmp_path / "y.txt").write_text("after it")
    path.write_bytes(whole)
    everything = [d.text for d in read_documents([path])]
    cuts = {1, 7, 8, 9, len(whole) // 3, len(whole) // 2, *range(len(whole) - 12, len(whole))}
    for cut in sorted(cuts):
        path.write_bytes(whole[:cut])
        with pytest.raises(DataError, match=rf"{kind}: .*({message}).*again; .*\(--on-bad skip\)$"):
            list(read_documents([path]))
        reader = DocumentReader([path, tmp_path / "y.txt"], SourceOptions(on_bad="skip"))
        found = [d.text for d in reader]
        assert found[-1] == "after it"
        assert found[:-1] == everything[: len(found) - 1]
        assert reader.skipped["damaged file"] == 1
        assert [file.bytes for file in reader.finished_files] == [cut, 8]


def test_an_arrow_stream_cut_at_the_border_of_two_batches(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    out = io.BytesIO()
    batch = pa.record_batch({"text": [str(i) for i in range(5)]})
    with pa.ipc.new_stream(out, batch.schema) as writer:
        writer.write_batch(batch)
        border = out.tell()
        writer.write_batch(batch)
    cut = out.getvalue()[:border]
    assert pa.ipc.open_stream(cut).read_all().num_rows == 5  # pyarrow takes it for a whole one
    (tmp_path / "x.arrow").write_bytes(cut)
    with pytest.raises(DataError, match=r"x\.arrow: truncated arrow stream: its end mark is missing"):
        list(read_documents([tmp_path / "x.arrow"]))


@pytest.mark.parametrize("kind", ["x.jsonl.gz", "x.jsonl.zst"])
def test_a_big_file_that_is_damaged_early_is_hashed_whole(tmp_path: Path, kind: str) -> None:
    letters = random.Random(1).randbytes(2_200_000).hex()
    whole = b"".join(b'{"text": "%s"}\n' % letters[i : i + 1000].encode() for i in range(0, len(letters), 1000))
    packed = bytearray(gzip.compress(whole, 1) if kind.endswith(".gz") else zstandard_of(whole))
    assert len(packed) > 2_000_000
    packed[300_000] ^= 0x55
    path = tmp_path / kind
    path.write_bytes(packed)
    reader = DocumentReader([path], SourceOptions(on_bad="skip"))
    assert list(reader) == []
    assert reader.skipped["damaged file"] == 1
    assert 0 < reader.skipped["unconfirmed before damage"] <= len(letters) // 1000
    (file,) = reader.finished_files
    assert (file.bytes, file.sha256) == (len(packed), hashlib.sha256(packed).hexdigest())


def test_garbage_after_a_packed_file(tmp_path: Path) -> None:
    for kind, packed in (("x.jsonl.gz", gzip.compress(GOOD)), ("x.jsonl.zst", zstandard_of(GOOD))):
        (tmp_path / kind).write_bytes(packed + b"garbage of some length")
        with pytest.raises(DataError, match=rf"{kind}: damaged (gzip|zstandard) file"):
            list(read_documents([tmp_path / kind]))


@pytest.mark.parametrize("array", ['[{"text": "a"}', '[{"text": "a"}] 3', "[\xff]"])
def test_a_broken_array_is_a_damaged_file(tmp_path: Path, array: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(array.encode("latin-1"))
    with pytest.raises(DataError, match=r"x\.json: not (a JSON value|UTF-8)"):
        list(read_documents([path]))
    reader = DocumentReader([path], SourceOptions(on_bad="skip"))
    assert list(reader) == []
    assert reader.skipped == {"damaged file": 1}


def test_bad_records_of_an_array_are_counted_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('\ufeff [{"text": "a"}, 3, {"text": "\\ud800"}, {"text": "d"}]')
    reader = DocumentReader([path], SourceOptions(on_bad="skip"))
    assert [(d.text, d.source) for d in reader] == [("a", f"{path}:1"), ("d", f"{path}:4")]
    assert reader.skipped == {"not a record": 1, "half of a surrogate pair": 1}


def test_a_bad_text_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("caf\xe9".encode("latin-1"))
    (tmp_path / "b.txt").write_bytes("\ufeffa".encode("utf-16"))
    (tmp_path / "c.txt").write_bytes(b"good")
    with pytest.raises(DataError, match=rf"{tmp_path}/a\.txt: not UTF-8 at byte 3 \(.*iconv; .*\(--on-bad skip\)$"):
        list(read_documents([tmp_path]))
    reader = DocumentReader([tmp_path], SourceOptions(on_bad="skip"))
    assert [d.text for d in reader] == ["good"]
    assert reader.skipped == {"not UTF-8": 2}


def test_what_is_kept_as_it_is(tmp_path: Path) -> None:
    text = "a\r\nb\x00c\rd\n\n\ufeffe"
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps({"text": text}).encode() + b"\r\n\r\n \t\r\n")
    reader = DocumentReader([tmp_path], SourceOptions(on_bad="skip"))
    assert [d.text for d in reader] == [text, text]
    assert not reader.skipped


def test_empty_files(tmp_path: Path) -> None:
    for name in ("a.txt", "b.jsonl", "c.json"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(b""))
    (tmp_path / "e.json").write_bytes(b"[]")
    (tmp_path / "f.parquet").write_bytes(parquet_of({"text": []}))
    reader = DocumentReader(
        [tmp_path], SourceOptions(suffixes=[".txt", ".jsonl", ".json", ".jsonl.gz", ".parquet"], on_bad="skip")
    )
    # An empty text file is an empty document; a column without rows has no type, and no row that could be bad.
    assert [(d.text, d.file_index) for d in reader] == [("", 0)]
    assert not reader.skipped
    assert reader.source_files().files == 6
    for name in ("x.parquet", "x.jsonl.gz", "x.jsonl.zst", "x.arrow"):
        (tmp_path / name).write_bytes(b"")
    assert list(read_documents([tmp_path / "x.jsonl.gz"])) == []  # as gunzip sees it: no member
    assert list(read_documents([tmp_path / "x.jsonl.zst"])) == []
    for name in ("x.parquet", "x.arrow"):
        with pytest.raises(DataError, match=name):
            list(read_documents([tmp_path / name]))


def test_errors_of_the_disk_are_never_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(GOOD)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error", str(path))

    reader = DocumentReader([path], SourceOptions(on_bad="skip"))
    monkeypatch.setattr("os.open", refuse)
    with pytest.raises(DataError, match=rf"cannot read {path}: Input/output error; the disk reports an error"):
        list(reader)
    monkeypatch.undo()
    path.unlink()
    with pytest.raises(DataError, match=rf"cannot read {path}: No such file"):
        list(reader)


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz", "x.parquet"])
def test_a_file_that_changes_after_it_was_listed_is_never_skipped(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(GOOD * 2)
    for content in (GOOD, GOOD * 3):
        reader = DocumentReader([path], SourceOptions(on_bad="skip"))
        path.write_bytes(content)
        with pytest.raises(DataError, match=rf"{name}: \d+ bytes read of a file that had \d+ when it was listed"):
            list(reader)


def test_options_are_checked() -> None:
    for wrong, message in (
        ({"on_bad": "ignore"}, "on_bad = 'ignore': choose error or skip"),
        ({"text_field": ""}, "text_field = '': give a name"),
        ({"tokens_field": ""}, "tokens_field = ''"),
        ({"suffixes": ["txt"]}, "suffixes = "),
    ):
        with pytest.raises(DataError, match=message):
            SourceOptions(**wrong)  # pyright: ignore[reportArgumentType]


def test_files_that_a_folder_holds_besides_are_told(tmp_path: Path) -> None:
    for name in ("a.txt", "b.bin", "c.bin", "d.yml", "Makefile"):
        (tmp_path / name).write_bytes(b"x")
    reader = DocumentReader([tmp_path])
    others = "4 files (.bin 2, .yml 1, Makefile 1)"
    assert (reader.ignored_files, reader.notices()) == (
        others,
        [f"not read: {others}; name their suffixes to read them (--suffix)"],
    )
    assert f"{others} ignored" in reader.description
    assert DocumentReader([tmp_path / "a.txt"]).ignored_files == ""


@pytest.mark.parametrize(
    "content",
    [b'{"body": "a"}\n\n{"body": "b"}\n', b' [{"body": "a"},\n {"body": "b"}]\n', b'{"body": "a"}\r\n{"body": "b"}'],
    ids=["lines", "array", "lines without an end"],
)
def test_json_of_a_folder_is_read_packed_or_not(tmp_path: Path, content: bytes) -> None:
    for packed, pack in (("", bytes), (".gz", gzip.compress), (".zst", zstandard_of)):
        for kind in (".json", ".ndjson") if content.startswith(b"{") else (".json",):
            (tmp_path / f"x{kind}{packed}").write_bytes(pack(content))
    reader = DocumentReader([tmp_path], SourceOptions(text_field="body"))
    assert [d.text for d in reader] == ["a", "b"] * reader.n_files
    assert (reader.n_files, reader.notices()) == (len(list(tmp_path.iterdir())), [])


BIG = """
import json, re, sys
from lt_data import read_documents
lengths = [len(document.text) for document in read_documents([sys.argv[1]])]
status = open("/proc/self/status", encoding="utf-8").read()  # getrusage would tell of the parent's memory too
print(json.dumps([lengths, int(re.search(r"VmHWM:\\s*(\\d+) kB", status)[1])]))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize(
    "kind",
    [pytest.param("x.txt", marks=pytest.mark.slow), pytest.param("x.jsonl", marks=pytest.mark.slow), "x.jsonl.gz"],
)
def test_a_document_of_100_megabytes_is_not_copied_around(tmp_path: Path, kind: str) -> None:
    size = 100_000_000
    words = b"0123456789abcde " * (size // 16)
    path = tmp_path / kind
    content = words if kind == "x.txt" else b'{"text": "a"}\n{"text": "' + words + b'"}\n{"text": "b"}\n'
    path.write_bytes(gzip.compress(content, 1) if kind.endswith(".gz") else content)
    run = subprocess.run([sys.executable, "-c", BIG, str(path)], capture_output=True, encoding="utf-8", check=True)
    lengths, kibibytes = json.loads(run.stdout)
    assert lengths == ([size] if kind == "x.txt" else [1, size, 1])
    assert kibibytes * 1024 < 3 * size + 60_000_000  # two copies of it at a time, and Python


def test_a_missing_file_system_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(
        DataError, match=r"cannot read gs://bucket/x\.txt: .*gcsfs.*install the fsspec package for gs://"
    ):
        read_documents(["gs://bucket/x.txt"])
