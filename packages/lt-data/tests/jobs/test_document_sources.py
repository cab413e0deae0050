"""From a document of a store back to its source: the text at the named place is the one that was decoded."""

import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lt_data
from lt_data import DataError, SourceOptions, TokenStore
from lt_data.store.document_sources import format_source
from lt_data.store.manifest import Selection

FORMATS = ("jsonl", "jsonl.gz", "json", "parquet", "arrow", "txt")
SKIP = SourceOptions(on_bad="skip")
BAD = None  # stands for a record that cannot be read


def write_file(folder: Path, number: int, kind: str, records: list[str | None]) -> Path:
    """Write records in a format; a bad one is a broken line, a null or (text) no file at all."""
    path = folder / f"{number}.{kind}"
    lines = [json.dumps({"text": text}) if text is not BAD else '{"text": broken' for text in records]
    if kind == "jsonl":
        path.write_text("\n\n".join(lines) + "\n", encoding="utf-8")  # every second line is blank
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress(("\n".join(lines) + "\n").encode()))
    elif kind == "json":
        path.write_text(json.dumps([{"text": text} for text in records]), encoding="utf-8")
    elif kind == "txt":
        path.write_text(records[0] or "", encoding="utf-8")
    else:
        pa = pytest.importorskip("pyarrow")
        table = pa.table({"text": pa.array(records, pa.string())})
        if kind == "parquet":
            import pyarrow.parquet

            pyarrow.parquet.write_table(table, path, row_group_size=2)
        else:
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
                writer.write_table(table, max_chunksize=3)
    return path


def read_place(place: str) -> str:
    """Return the text at `path:line`, `path#row` or `path`, read without lt_data."""
    if place.endswith(".txt"):
        return Path(place).read_text(encoding="utf-8")
    separator = ":" if ".json" in place else "#"
    name, _, number = place.rpartition(separator)
    if ".jsonl" in name:
        content = Path(name).read_bytes()
        lines = (gzip.decompress(content) if name.endswith(".gz") else content).split(b"\n")
        return json.loads(lines[int(number) - 1])["text"]
    if name.endswith(".json"):
        return json.loads(Path(name).read_text(encoding="utf-8"))[int(number) - 1]["text"]
    pa = pytest.importorskip("pyarrow")
    if name.endswith(".parquet"):
        import pyarrow.parquet

        table = pyarrow.parquet.read_table(name)
    else:
        table = pa.ipc.open_stream(Path(name).read_bytes()).read_all()
    return table.column("text")[int(number) - 1].as_py()


def check_sources(folder: Path) -> TokenStore:
    """Check that each document is the text at its source, in the order of the sources."""
    store = TokenStore(folder)
    store.verify()
    tokenizer = store.tokenizer()
    for index in range(store.n_documents):
        source = store.document_source(index)
        text = tokenizer.decode(store[index], skip_special_tokens=True)
        assert source is not None
        assert text == read_place(str(source)), source
    return store


TEXT = st.one_of(st.sampled_from(["repeated", "again and again", "", "東京 🦊", "x\ny"]), st.text("abc é", max_size=20))
FILES = st.lists(
    st.tuples(st.sampled_from(FORMATS), st.lists(st.one_of(st.just(BAD), TEXT), min_size=1, max_size=8)),
    min_size=1,
    max_size=5,
)


@given(files=FILES, drop=st.booleans(), unit_bytes=st.integers(50, 500), shard_tokens=st.sampled_from([7, 10_000]))
@settings(max_examples=8)
def test_any_document_is_the_text_at_its_source(memory, tokenizer, files, drop, unit_bytes, shard_tokens):
    with tempfile.TemporaryDirectory(dir=memory) as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr("lt_data.tokenizing.encode._BATCH_DOCUMENTS", 3)
        folder = Path(name)
        paths = [write_file(folder, i, kind, records) for i, (kind, records) in enumerate(files)]
        job: dict[str, Any] = {"tokenizer": tokenizer, "engine": "hf", "options": SKIP, "shard_tokens": shard_tokens}
        job["selection"] = Selection(drop_duplicates=drop)
        if not any(any(records[:1] if kind == "txt" else records) for kind, records in files):
            with pytest.raises(DataError, match="no text in"):
                lt_data.prepare(paths, out=folder / "store", **job)
            return
        lt_data.prepare(paths, out=folder / "store", **job)
        store = check_sources(folder / "store")
        assert lt_data.prepare(paths, out=folder / "units", unit_bytes=unit_bytes, **job).documents == store.n_documents
        if all(kind in ("json", "txt", "arrow", "jsonl.gz") for kind, _ in files):  # never divided
            check_sources(folder / "units")


def test_more_source_files_than_the_manifest_lists(fast_path, corpus, options, monkeypatch):
    monkeypatch.setattr("lt_data.sources.reader.MAX_LISTED_SOURCES", 3)
    out = fast_path / "store"
    lt_data.prepare([corpus], out=out, **options)
    assert len(check_sources(out).source_files) == 9
    content = (out / "sources.jsonl").read_bytes()
    (out / "sources.jsonl").write_bytes(content.replace(b"0.jsonl", b"9.jsonl"))
    with pytest.raises(DataError, match=r"sources\.jsonl: SHA-256 differs"):
        TokenStore(out).document_source(0)
    (out / "sources.jsonl").unlink()
    with pytest.raises(DataError, match=r"cannot read .*sources\.jsonl"):
        TokenStore(out).verify()


@pytest.mark.parametrize(
    ("path", "record", "expected"),
    [
        ("a/b.jsonl.gz", 3, "a/b.jsonl.gz:3"),
        ("s3://b/x.NDJSON", 3, "s3://b/x.NDJSON:3"),
        ("https://h/x.jsonl?v=1", 3, "https://h/x.jsonl?v=1:3"),
        ("c4.json.gz", 3, "c4.json.gz:3"),
        ("x.parquet", 3, "x.parquet#3"),
        ("hf://org/name@c/default/train/0-9", 3, "hf://org/name@c/default/train/0-9#3"),
        ("x.txt", 0, "x.txt"),
    ],
)
def test_the_name_of_a_place(path, record, expected):
    assert format_source(path, record) == expected


def test_lines_without_a_document_keep_their_numbers(tmp_path, tokenizer, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text('\n{"text": "one"}\n{"text": ""}\n{"text": "two"}\n', encoding="utf-8")
    lt_data.prepare(["in.jsonl"], tokenizer=tokenizer, out="store")
    assert [str(TokenStore("store").document_source(i)) for i in (0, 1)] == ["in.jsonl:2", "in.jsonl:4"]
