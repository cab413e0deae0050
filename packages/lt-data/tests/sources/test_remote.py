"""Files over http and S3, from real servers of this machine: whole, broken, and not there."""

import bz2
import gzip
import io
import json

import pytest

from lt_data import DataError, SourceOptions
from lt_data.sources.reader import DocumentReader, read_documents

TEXTS = [f"document {i} é" for i in range(2000)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def parquet() -> bytes:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    import pyarrow.parquet

    out = io.BytesIO()
    pyarrow.parquet.write_table(pa.table({"text": TEXTS}), out, row_group_size=300)
    return out.getvalue()


def test_user_and_password_of_a_url_are_not_shown():
    from lt_data.file_names import redact_url

    url = "https://user:secret@host:8080/a/x.jsonl?token=secret#secret"
    assert redact_url(url) == "https://host:8080/a/x.jsonl"
    for same in ("s3://bucket/a?b#c", "hf://name@v1?split=train", "hf://datasets/org/name@v1/a", "/a/b@c?d", "C:x"):
        assert redact_url(same) == same
    assert redact_url(f"zip://x.jsonl::{url}") == "zip://x.jsonl::https://host:8080/a/x.jsonl"
    assert redact_url("smb://user:secret@host/a?b") == "smb://host/a?b"
    assert redact_url("https://user:secret@[host/a") == "https://..."


def test_s3(s3, tmp_path):
    s3.mkdir("bucket")
    for name, content in {
        "corpus/b.jsonl": LINES,
        "corpus/a/x.parquet": parquet(),
        "corpus/B.txt": b"text",
        "corpus/skip.bin": b"x",
        "saved/state.json": json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}).encode(),
        "saved/dataset_info.json": b"{}",
    }.items():
        s3.pipe(f"bucket/{name}", content)
    reader = DocumentReader(["s3://bucket/corpus"])
    found = list(reader)
    assert [d.text for d in found] == ["text", *TEXTS, *TEXTS]
    assert [file.path for file in reader.finished_files] == [
        "s3://bucket/corpus/B.txt",
        "s3://bucket/corpus/a/x.parquet",
        "s3://bucket/corpus/b.jsonl",
    ]
    assert found[-1].source == "s3://bucket/corpus/b.jsonl:2000"
    divided = reader.divided(9000)
    assert divided.n_files > 4
    assert [d.text for d in divided] == [d.text for d in found]
    with pytest.raises(
        DataError, match=r"bucket/saved/data-00000-of-00001\.arrow: a file of the saved dataset is missing"
    ):
        read_documents(["s3://bucket/saved"])
    for wrong in ("s3://bucket/nowhere", "s3://nobucket/x.txt"):
        with pytest.raises(DataError, match=f"cannot read {wrong}: .*"):
            read_documents([wrong])
    for suffix, pack in ((".gz", gzip.compress), (".bz2", bz2.compress)):
        content = pack(LINES)
        s3.pipe(f"bucket/bad/x.jsonl{suffix}", content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
        with pytest.raises(DataError, match=rf"s3://bucket/bad/x\.jsonl{suffix}: damaged file"):
            list(read_documents([f"s3://bucket/bad/x.jsonl{suffix}"]))
    s3.pipe("bucket/bad/y.txt", b"good")
    bad = DocumentReader(["s3://bucket/bad"], SourceOptions(on_bad="skip"))
    assert ([d.text for d in bad], bad.skipped) == (["good"], {"damaged file": 2})
    s3.pipe("bucket/gone.jsonl", LINES)
    gone = DocumentReader(["s3://bucket/gone.jsonl"], SourceOptions(on_bad="skip"))
    s3.rm("bucket/gone.jsonl")
    with pytest.raises(DataError, match=r"cannot read s3://bucket/gone\.jsonl: .*"):
        list(gone)
