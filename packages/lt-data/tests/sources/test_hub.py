"""Datasets of the hub, read by the real `datasets`: splits, ranges of rows, streams, names and hashes."""

import gzip
import hashlib
import json
import pickle
import random

import pytest

from lt_data import DataError, SourceOptions
from lt_data.sources import hub as hub_module
from lt_data.sources.reader import DocumentReader

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TRAIN = [f"train {i} é" for i in range(20)]
TEST = [f"test {i}" for i in range(7)]
ONE, TWO = f"hf://org/one@{COMMIT}/default/train", f"hf://org/two@{COMMIT}/default/train"


def lines(texts: list[str | None]) -> bytes:
    return "".join(json.dumps({"text": text, "n": i}) + "\n" for i, text in enumerate(texts)).encode()


IDS = [{"input_ids": [1, 2], "attention_mask": [1, 0]}, {"input_ids": [70000], "attention_mask": [1]}]
CONFIGS = {"configs": [{"config_name": name, "data_files": f"{name}/*.jsonl"} for name in ("en", "de")]}
FILES: dict[str, bytes] = {
    "org/one/data/train.jsonl": lines([*TRAIN]),
    "org/two/data/train-00000-of-00002.jsonl": lines([*TRAIN[:12]]),
    "org/two/data/train-00001-of-00002.jsonl": lines([*TRAIN[12:]]),
    "org/two/data/test-00000-of-00001.jsonl": lines([*TEST]),
    "org/configs/README.md": b"---\n" + json.dumps(CONFIGS).encode() + b"\n---\n",
    "org/configs/en/x.jsonl": lines([*TRAIN]),
    "org/configs/de/x.jsonl": lines([*TEST]),
    "org/ids/train.jsonl": "".join(json.dumps(row) + "\n" for row in IDS).encode(),
    "org/nulls/train.jsonl": lines(["a", None, "c"]),
    "org/broken/train.jsonl": b'{"text": "a"}\n{"text": \n',
}
# source, options, texts or words of the error
CASES: list[tuple[str, dict[str, object], list[str] | list[list[int]] | str]] = [
    ("org/one", {}, TRAIN),
    ("org/one?streaming=false", {"streaming": True}, TRAIN),
    ("org/two", {}, "the splits are train, test; choose with split (--split)"),
    ("org/two", {"split": "test"}, TEST),
    ("org/two?split=train[:10%]", {}, TRAIN[:2]),
    ("org/two", {"split": "train+test"}, TRAIN + TEST),
    ("org/two", {"split": "dev"}, "Unknown split"),
    ("org/two?split=train&streaming=true", {}, TRAIN),
    ("org/two?split=train[5:18]&streaming=true", {}, TRAIN[5:18]),
    ("org/two?split=train[15:]&streaming=true", {}, TRAIN[15:]),
    ("org/two?split=train[:10%]&streaming=true", {}, "cannot read hf://org/two"),
    ("org/configs", {}, "Config name is missing"),
    ("org/configs?config=de", {}, TEST),
    ("org/ids", {"tokens_field": "input_ids"}, [[1], [70000]]),
    ("org/ids", {"tokens_field": "input_ids", "streaming": True}, [[1], [70000]]),
    ("org/ids", {}, "no field 'text' (found fields 'input_ids', 'attention_mask')"),
    ("org/nulls", {}, f"hf://org/nulls@{COMMIT}/default/train/0-3#2: field 'text' is null"),
    ("org/nulls", {"on_bad": "skip"}, ["a", "c"]),
    ("org/broken", {}, "cannot read hf://org/broken"),
    ("org/one?splt=train", {}, "unknown setting 'splt'; there are config, split, revision, streaming"),
    ("org/one?streaming=1", {}, "streaming = '1': give true or false"),
    ("org/one/data/train.jsonl", {}, "a dataset is named hf://org/name; single files are named hf://datasets/org/"),
]


@pytest.mark.parametrize(("source", "options", "expected"), CASES)
def test_datasets_of_the_hub(hub, source, options, expected):
    hub(FILES)
    try:
        reader = pickle.loads(pickle.dumps(DocumentReader([f"hf://{source}"], SourceOptions(**options))))
        found = [document.text if document.ids is None else document.ids.tolist() for document in reader]
    except DataError as exc:
        found = str(exc)
    assert expected in found if isinstance(expected, str) else expected == found


def test_damaged_files_of_the_hub(hub):
    """`datasets` finds the damage at the end of a streamed file, when it has given its rows."""
    content = gzip.compress(lines([random.Random(i).randbytes(50).hex() for i in range(90_000)]), 1)
    damaged = content[:-7] + bytes([content[-7] ^ 1]) + content[-6:]
    hub({"org/bad/train-0.jsonl.gz": damaged, "org/bad/train-1.jsonl.gz": gzip.compress(lines(["good"]))})
    source = "hf://org/bad?split=train"
    with pytest.raises(DataError, match=r"hf://org/bad.split=train: damaged file"):
        DocumentReader([source])
    reader = DocumentReader([f"{source}&streaming=true"], SourceOptions(on_bad="skip"))
    assert [document.text for document in reader] == ["good"]
    assert reader.skipped == {"damaged file": 1}
    assert "part-0-of-2: damaged file: " in reader.skip_examples["damaged file"]


def test_rows_have_names_hashes_and_fields(hub, monkeypatch):
    hub(FILES)
    reader = DocumentReader(["hf://org/one"], SourceOptions(keep_fields=True))
    documents = list(reader)
    assert [document.fields for document in documents] == [{"text": text, "n": i} for i, text in enumerate(TRAIN)]
    assert [document.source for document in documents] == [f"{ONE}/0-20#{i}" for i in range(1, 21)]
    content = b"".join(len(text.encode()).to_bytes(8, "little") + text.encode() for text in TRAIN)
    (file,) = reader.finished_files
    expected = (f"{ONE}/0-20", len(content), hashlib.sha256(content).hexdigest())
    assert (file.path, file.bytes, file.sha256) == expected
    streamed = DocumentReader(["hf://org/two?split=train&streaming=true"])
    shards = [f"{TWO}/part-{i}-of-2" for i in (0, 1)]
    names = [*(f"{shards[0]}#{i}" for i in range(1, 13)), *(f"{shards[1]}#{i}" for i in range(1, 9))]
    assert [document.source for document in streamed] == names
    parts = [[d.text for d in streamed.slice(*group)] for group in streamed.group(1)]
    assert parts == [TRAIN[:12], TRAIN[12:]]
    monkeypatch.setattr(hub_module, "ROWS_PER_PIECE", 8)
    pieces = DocumentReader(["hf://org/two?split=train"])
    assert [document.text for document in pieces] == TRAIN
    assert [file.path for file in pieces.finished_files] == [f"{TWO}/0-8", f"{TWO}/8-16", f"{TWO}/16-20"]
