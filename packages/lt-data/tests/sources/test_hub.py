"""Datasets of the hub, by the real `datasets` from a hub of this machine."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TRAIN = [f"train {i} é" for i in range(20)]
TEST = [f"test {i}" for i in range(7)]
ONE, TWO = f"hf://org/one@{COMMIT}/default/train", f"hf://org/two@{COMMIT}/default/train"


def lines(texts: list[str | None]) -> bytes:
    return "".join(json.dumps({"text": text, "n": i}) + "\n" for i, text in enumerate(texts)).encode()


IDS = [{"input_ids": [1, 2], "attention_mask": [1, 0]}, {"input_ids": [70000], "attention_mask": [1]}]
CONFIGS = {"configs": [{"config_name": name, "data_files": f"{name}/*.jsonl"} for name in ("en", "de")]}
FILES: dict[str, dict[str, bytes]] = {
    "org/one": {"data/train.jsonl": lines([*TRAIN])},
    "org/one@v1": {"data/train.jsonl": lines([*TEST])},
    "org/two": {
        "data/train-00000-of-00002.jsonl": lines([*TRAIN[:12]]),
        "data/train-00001-of-00002.jsonl": lines([*TRAIN[12:]]),
        "data/test-00000-of-00001.jsonl": lines([*TEST]),
    },
    "org/configs": {
        "README.md": b"---\n" + json.dumps(CONFIGS).encode() + b"\n---\n",
        "en/x.jsonl": lines([*TRAIN]),
        "de/x.jsonl": lines([*TEST]),
    },
    "org/ids": {"train.jsonl": "".join(json.dumps(row) + "\n" for row in IDS).encode()},
    "org/nulls": {"train.jsonl": lines(["a", None, "c"])},
    "org/broken": {"train.jsonl": b'{"text": "a"}\n{"text": \n'},
    "org/private": {"train.jsonl": lines([*TRAIN])},
}
STREAM = {"streaming": True}
# source, options, texts or words of the error
CASES: list[tuple[str, dict[str, Any], list[Any] | str]] = [
    ("org/one", {}, TRAIN),
    ("org/one", STREAM, TRAIN),
    (f"org/one@{COMMIT}", {}, TRAIN),
    ("org/one?streaming=false", STREAM, TRAIN),
    ("org/one@v1", {}, TEST),
    ("org/one", {"revision": "v1", **STREAM}, TEST),
    ("org/two", {}, "the splits are train, test; choose with split (--split)"),
    ("org/two", {"split": "test"}, TEST),
    ("org/two?split=train[:10%]", {}, TRAIN[:2]),
    ("org/two", {"split": "train[5:8]"}, TRAIN[5:8]),
    ("org/two", {"split": "train+test"}, TRAIN + TEST),
    ("org/two", {"split": "dev"}, "Unknown split"),
    ("org/two?split=train&streaming=true", {}, TRAIN),
    ("org/two?split=train[5:18]&streaming=true", {}, TRAIN[5:18]),
    ("org/two?split=train[15:]&streaming=true", {}, TRAIN[15:]),
    ("org/two?split=train[:10%]&streaming=true", {}, "cannot read hf://org/two"),
    ("org/configs", {}, "Config name is missing"),
    ("org/configs?config=de", {}, TEST),
    ("org/configs", {"config": "en", **STREAM}, TRAIN),
    ("org/ids", {"tokens_field": "input_ids"}, [[1], [70000]]),
    ("org/ids", {"tokens_field": "input_ids", **STREAM}, [[1], [70000]]),
    ("org/ids", {}, "no field 'text' (found fields 'input_ids', 'attention_mask')"),
    ("org/nulls", {}, f"hf://org/nulls@{COMMIT}/default/train/0-3#2: field 'text' is null"),
    ("org/nulls", {"on_bad": "skip"}, ["a", "c"]),
    ("org/broken", {}, "cannot read hf://org/broken"),
    ("datasets/org/one/data/train.jsonl", {}, TRAIN),
    ("org/nothing", {}, "cannot read hf://org/nothing"),
    ("org/private", {}, "cannot read hf://org/private"),
    ("org/one@nowhere", {}, "cannot read hf://org/one@nowhere"),
    ("org/one?splt=train", {}, "unknown setting 'splt'; there are config, split, revision, streaming"),
    ("org/one?streaming=1", {}, "streaming = '1': give true or false"),
    ("org/one/data/train.jsonl", {}, "a dataset is named hf://org/name; single files are named hf://datasets/org/"),
]
MORE = [
    {"source": "hf://org/one", "options": {"keep_fields": True}},
    {"source": "hf://org/two?split=train", "piece_rows": 8},
]


def read(hub: Any, cases: list[dict[str, Any]], **environment: str) -> list[dict[str, Any]]:
    out = hub.run(str(Path(__file__).with_name("hub_reads.py")), given=json.dumps(cases), **environment)
    return [json.loads(line) for line in out.splitlines()]


@pytest.fixture(scope="module")
def answers(hub: Any) -> list[dict[str, Any]]:
    """Every case, read in one process: importing `datasets` takes seconds."""
    hub.files, hub.private = FILES, {"org/private"}
    return read(hub, [{"source": f"hf://{source}", "options": options} for source, options, _ in CASES] + MORE)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_datasets_of_the_hub(answers: list[dict[str, Any]], number: int) -> None:
    answer, expected = answers[number], CASES[number][2]
    if isinstance(expected, str):
        assert expected in answer["error"]
    else:
        assert answer.get("texts") == expected, answer
        assert [text for part in answer["parts"] for text in part] == [
            text if isinstance(text, str) else None for text in expected
        ]


def test_rows_have_names_hashes_and_fields(answers: list[dict[str, Any]]) -> None:
    def of(source: str) -> dict[str, Any]:
        return answers[next(i for i, case in enumerate(CASES) if case[0] == source)]

    content = b"".join(len(text.encode()).to_bytes(8, "little") + text.encode() for text in TRAIN)
    assert answers[0]["files"] == [[f"{ONE}/0-20", len(content), hashlib.sha256(content).hexdigest()]]
    assert answers[0]["sources"] == [f"{ONE}/0-20#{i}" for i in range(1, 21)]
    assert answers[4]["files"][0][0].startswith(f"hf://org/one@{COMMIT[::-1]}/default/train/")
    shards = [f"{TWO}/part-{i}-of-2" for i in (0, 1)]
    streamed = [*(f"{shards[0]}#{i}" for i in range(1, 13)), *(f"{shards[1]}#{i}" for i in range(1, 9))]
    assert of("org/two?split=train&streaming=true")["sources"] == streamed
    assert of("org/two?split=train&streaming=true")["parts"] == [TRAIN[:12], TRAIN[12:]]
    assert of("org/two?split=train[5:18]&streaming=true")["sources"][0] == f"{TWO}[5:18]#6"
    assert of("org/ids")["skipped"] == {"ids that the attention mask hides": 1}
    fields, many = answers[len(CASES) :]
    assert fields["fields"] == [{"text": text, "n": i} for i, text in enumerate(TRAIN)]
    assert [file[0] for file in many["files"]] == [f"{TWO}/0-8", f"{TWO}/8-16", f"{TWO}/16-20"]
    assert many["texts"] == TRAIN
    assert many["sources"][15:17] == [f"{TWO}/8-16#16", f"{TWO}/16-20#17"]


@pytest.mark.slow
def test_without_network_the_cache_is_read(hub: Any, answers: list[dict[str, Any]]) -> None:
    assert answers
    asked = len(hub.asked)
    cases = [{"source": f"hf://org/two@{COMMIT}?split=train[5:8]"}, {"source": "hf://org/nothing"}]
    found, lost = read(hub, cases, HF_HUB_OFFLINE="1")
    assert found["texts"] == TRAIN[5:8]
    assert "cannot read hf://org/nothing" in lost["error"]
    assert len(hub.asked) == asked
