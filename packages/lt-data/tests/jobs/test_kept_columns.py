"""Columns that are kept beside the documents: values, types, counts, and the same bytes from any way to a store."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lt_data
from lt_data import DataError, SourceOptions, TokenStore
from lt_data.sources.reader import DocumentReader
from lt_data.store.document_columns import make_row, parse_columns
from lt_data.store.manifest import Selection

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")

KEEP = ("url", "n:int", "score:float", "safe:bool")
VALUES = st.fixed_dictionaries(
    {"text": st.one_of(st.sampled_from(["repeated", "x", ""]), st.text("ab é", max_size=8))},
    optional={
        "url": st.one_of(st.none(), st.text(max_size=8), st.integers(), st.lists(st.integers(), max_size=2)),
        "n": st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)),
        "score": st.one_of(st.none(), st.integers(-9, 9), st.floats(allow_nan=False)),
        "safe": st.one_of(st.none(), st.booleans()),
    },
)


def as_kept(record: dict[str, Any]) -> dict[str, Any]:
    """Return the columns of a record as they are to be read again."""
    url, score = record.get("url"), record.get("score")
    return {
        "url": url if url is None or isinstance(url, str) else json.dumps(url, ensure_ascii=False),
        "n": record.get("n"),
        "score": None if score is None else float(score),
        "safe": record.get("safe"),
    }


def write_records(path: Path, records: list[dict[str, Any]]) -> None:
    lines = "".join(json.dumps(record) + "\n" for record in records).encode()
    path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)


def kept(store: TokenStore) -> list[dict[str, Any]]:
    return [store.document_columns(i) for i in range(store.n_documents)]


def check_store(folder: Path) -> TokenStore:
    store = TokenStore(folder)
    store.verify()
    for i, info in enumerate(store.manifest.columns):
        assert sum(store.shard_columns(n).column(i).null_count for n in range(len(store.manifest.shards))) == info.nulls
    return store


@given(
    files=st.lists(st.lists(VALUES, min_size=1, max_size=12), min_size=2, max_size=4),
    drop=st.booleans(),
    shard_tokens=st.sampled_from([9, 10_000]),
)
@settings(max_examples=20)
def test_columns_are_those_of_the_records(tmp_path_factory, memory, tokenizer, files, drop, shard_tokens):
    folder = memory / tmp_path_factory.mktemp("columns").name
    folder.mkdir()
    files[0][0] = {"text": "there is always one", "url": "u"}
    for number, records in enumerate(files):
        write_records(folder / f"{number}.jsonl{'.gz' if number % 2 else ''}", records)
    paths = sorted(folder.iterdir())
    options: dict[str, Any] = {
        "tokenizer": tokenizer,
        "engine": "hf",
        "keep": KEEP,
        "selection": Selection(drop_duplicates=drop),
        "shard_tokens": shard_tokens,
    }
    lt_data.prepare(paths, out=folder / "store", **options)
    store = check_store(folder / "store")
    records = [record for records in files for record in records if record["text"]]
    if drop:
        texts = [record["text"] for record in records]
        records = [record for i, record in enumerate(records) if record["text"] not in texts[:i]]
    assert kept(store) == [as_kept(record) for record in records]
    units = lt_data.prepare(paths, out=folder / "units", unit_bytes=300, **options)
    assert drop or units.columns == store.manifest.columns
    assert kept(TokenStore(folder / "units")) == kept(store)


def test_a_table_gives_its_columns_without_the_others(tmp_path, tokenizer, monkeypatch):
    import datetime

    import pyarrow.parquet

    table = pa.table(
        {
            "other": ["o"] * 3,
            "url": ["a", None, "c"],
            "text": ["one", "two", "three"],
            "at": [datetime.date(2026, 1, 2)] * 3,
            "tags": [["x", "y"], [], None],
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    reader = DocumentReader([tmp_path / "x.parquet"], SourceOptions(keep_fields=["url", "at", "missing"]))
    assert [document.fields for document in reader] == [
        {"url": url, "text": text, "at": datetime.date(2026, 1, 2)}
        for url, text in (("a", "one"), (None, "two"), ("c", "three"))
    ]
    keep = ("url", "at", "tags", "missing")
    notices: list[str] = []
    manifest = lt_data.prepare(
        [tmp_path / "x.parquet"], tokenizer=tokenizer, out=tmp_path / "store", keep=keep, notify=notices.append
    )
    assert [column.nulls for column in manifest.columns] == [1, 0, 1, 3]
    assert notices[1:] == ["keep: no document has a field 'missing'; check the name"]
    store = check_store(tmp_path / "store")
    assert kept(store)[0] == {"url": "a", "at": '"2026-01-02"', "tags": '["x", "y"]', "missing": None}
    with pytest.raises(IndexError):
        store.document_columns(3)


@pytest.mark.parametrize(
    ("column", "value", "shown"),
    [
        ("n:int", 1.5, "1.5"),
        ("n:int", True, "true"),
        ("n:int", 2**63, "9223372036854775808"),
        ("n:float", "1", '"1"'),
        ("n:bool", 1, "1"),
        ("n:bool", [1], "list"),
        pytest.param("n:int", 10**5000, "int", id="thousands of digits"),
    ],
)
def test_a_value_of_another_type_is_named_with_its_place(column, value, shown):
    with pytest.raises(
        DataError, match=rf"^x\.jsonl:3: field 'n' holds {shown}, not {column[2:]}; keep it as a string"
    ):
        make_row(parse_columns([column]), {"n": value}, "x.jsonl:3")


@pytest.fixture
def small(tmp_path, tokenizer) -> Path:
    write_records(tmp_path / "in.jsonl", [{"text": "one", "url": "a"}, {"text": "two", "url": "b"}])
    lt_data.prepare([tmp_path / "in.jsonl"], tokenizer=tokenizer, out=tmp_path / "store", keep=["url"])
    return tmp_path / "store"


def test_damaged_columns_are_found_and_are_no_part_of_the_fingerprint(small, tmp_path, tokenizer):
    plain = lt_data.prepare([tmp_path / "in.jsonl"], tokenizer=tokenizer, out=tmp_path / "plain")
    assert plain.fingerprint == TokenStore(small).manifest.fingerprint
    path = small / "shards/00000.arrow"
    content = bytearray(path.read_bytes())
    content[content.index(b"ab")] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"00000\.arrow: SHA-256 differs"):
        TokenStore(small).verify()
    assert lt_data.verify(TokenStore(small))[0].startswith(str(path))
    path.write_bytes(content[:-1])
    with pytest.raises(DataError, match=r"00000\.arrow: \d+ bytes, the manifest says"):
        TokenStore(small)
