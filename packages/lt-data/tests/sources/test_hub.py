"""Datasets of the hub, by the real `datasets` from a hub of this machine, and folders that it saved."""

import hashlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TRAIN = [f"train {i} é" for i in range(20)]
TEST = [f"test {i}" for i in range(7)]


def lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text, "n": i}) + "\n" for i, text in enumerate(texts)).encode()


def parquet(columns: dict[str, Any]) -> bytes:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    import pyarrow.parquet

    out = io.BytesIO()
    pyarrow.parquet.write_table(pa.table(columns), out)
    return out.getvalue()


def readme(info: dict[str, Any]) -> bytes:
    return b"---\n" + json.dumps(info).encode() + b"\n---\n# A dataset\n"


CASES: dict[str, dict[str, Any]] = {
    "only split": {"sources": ["hf://org/one"]},
    "all columns": {"sources": ["hf://org/one"], "options": {"keep_fields": True}},
    "all columns, streamed": {"sources": ["hf://org/one"], "options": {"keep_fields": True, "streaming": True}},
    "again": {"sources": ["hf://org/one"], "position": [0, 18], "num_parts": 2},
    "by commit": {"sources": [f"hf://org/one@{COMMIT}"]},
    "not streamed": {"sources": ["hf://org/one?streaming=false"], "options": {"streaming": True}},
    "older": {"sources": ["hf://org/one@v1"]},
    "older, streamed": {"sources": ["hf://org/one"], "options": {"revision": "v1", "streaming": True}},
    "two splits": {"sources": ["hf://org/two"]},
    "split": {"sources": ["hf://org/two"], "options": {"split": "test"}},
    "percent": {"sources": ["hf://org/two?split=train[:10%]"]},
    "percents": {"sources": ["hf://org/two?split=train[25%:75%]"]},
    "rows": {"sources": ["hf://org/two"], "options": {"split": "train[5:8]"}},
    "last rows": {"sources": ["hf://org/two"], "options": {"split": "train[-2:]"}},
    "sum": {"sources": ["hf://org/two"], "options": {"split": "train+test"}},
    "no such split": {"sources": ["hf://org/two"], "options": {"split": "dev"}},
    "streamed": {"sources": ["hf://org/two?split=train"], "options": {"streaming": True}},
    "streamed from a point": {
        "sources": ["hf://org/two?split=train&streaming=true"],
        "position": [0, 8],
        "num_parts": 2,
    },
    "streamed rows": {"sources": ["hf://org/two?split=train[5:18]&streaming=true"], "position": [0, 2]},
    "streamed to the end": {"sources": ["hf://org/two?split=train[5:]&streaming=true"]},
    "streamed percent": {"sources": ["hf://org/unread?split=train[:10%]&streaming=true"]},
    "streamed percent, size told": {"sources": ["hf://org/told?split=train[50%:75%]&streaming=true"]},
    "no configuration": {"sources": ["hf://org/configs"]},
    "configuration": {"sources": ["hf://org/configs?config=de"]},
    "streamed configuration": {"sources": ["hf://org/configs"], "options": {"config": "en", "streaming": True}},
    "ids": {"sources": ["hf://org/ids"], "options": {"tokens_field": "input_ids"}},
    "streamed ids": {"sources": ["hf://org/ids"], "options": {"tokens_field": "input_ids", "streaming": True}},
    "no column": {"sources": ["hf://org/ids"]},
    "streamed, no column": {"sources": ["hf://org/ids"], "options": {"streaming": True}},
    "many": {"sources": ["hf://org/two?split=train"], "position": [1, 6], "num_parts": 2, "run_rows": 8},
    "nulls": {"sources": ["hf://org/nulls"]},
    "nulls left out": {"sources": ["hf://org/nulls"], "options": {"on_bad": "skip"}},
    "broken data": {"sources": ["hf://org/broken"]},
    "script": {"sources": ["hf://org/script"]},
    "script's files": {"sources": ["hf://datasets/org/script@refs%2Fconvert%2Fparquet/raw_en/train"]},
    "file": {"sources": ["hf://datasets/org/one/data/train.jsonl"], "position": [0, 15]},
    "unknown": {"sources": ["hf://org/nothing"]},
    "private": {"sources": ["hf://org/private"]},
    **{f"odd list {i}": {"sources": [f"hf://org/odd{i}"]} for i in range(5)},
    **{f"files of odd list {i}": {"sources": [f"hf://datasets/org/odd{i}/data"]} for i in range(5)},
    "no such revision": {"sources": ["hf://org/one@nowhere"]},
    "bad setting": {"sources": ["hf://org/one?splt=train"]},
    "bad value": {"sources": ["hf://org/one?streaming=1"]},
    "bad name": {"sources": ["hf://org/one/data/train.jsonl"]},
}


@pytest.fixture(scope="module")
def answers(hub, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Every case, read in one process: importing `datasets` takes seconds."""
    hub.files = {
        "org/one": {"data/train.jsonl": lines(TRAIN)},
        "org/one@v1": {"data/train.jsonl": lines(TEST)},
        "org/unread": {"train.jsonl": lines(TRAIN)},
        "org/two": {
            "README.md": b"# two",
            "data/train-00000-of-00002.jsonl": lines(TRAIN[:12]),
            "data/train-00001-of-00002.jsonl": lines(TRAIN[12:]),
            "data/test-00000-of-00001.jsonl": lines(TEST),
        },
        "org/told": {
            "README.md": readme({"dataset_info": {"splits": [{"name": "train", "num_bytes": 9, "num_examples": 20}]}}),
            "data/train.jsonl": lines(TRAIN),
        },
        "org/configs": {
            "README.md": readme(
                {"configs": [{"config_name": name, "data_files": f"{name}/*.jsonl"} for name in ("en", "de")]}
            ),
            "en/x.jsonl": lines(TRAIN),
            "de/x.jsonl": lines(TEST),
        },
        "org/ids": {
            "train.parquet": parquet({"input_ids": [[1, 2], [], [70000]], "attention_mask": [[1, 0], [], [1]]})
        },
        "org/nulls": {"train.parquet": parquet({"text": ["a", None, "c"]})},
        "org/broken": {"train.jsonl": b'{"text": "a"}\n{"text": \n'},
        "org/script": {"script.py": b"raise SystemExit", "raw_en/train/0000.parquet": parquet({"text": TEST})},
        "org/private": {"train.jsonl": lines(TRAIN)},
        **{f"org/odd{i}": {"data/train.jsonl": lines(TRAIN)} for i in range(5)},
    }
    odd = (b"[1]", b'"x"', b"[{}]", b'[{"type": "file", "path": 5, "size": "x", "oid": []}]', b"[" * 100_000)
    hub.odd_lists = {f"org/odd{i}": answer for i, answer in enumerate(odd)}
    hub.private = {"org/private"}
    cases = {**CASES, "saved": {"save": str(tmp_path_factory.mktemp("saved")), "texts": TRAIN}}
    out = hub.run(str(Path(__file__).with_name("hub_reads.py")), given=json.dumps(list(cases.values())))
    return dict(zip(cases, map(json.loads, out.splitlines()), strict=True))


def texts(answer: dict[str, Any]) -> list[Any]:
    assert "error" not in answer, answer
    return [document[0] for document in answer["documents"]]


def test_whole_splits(answers: dict[str, dict[str, Any]]) -> None:
    only = answers["only split"]
    name = f"hf://org/one@{COMMIT}/default/train/0-20"
    assert only["documents"] == [[text, f"{name}#{i}", 0, i] for i, text in enumerate(TRAIN, start=1)]
    content = b"".join(len(text.encode()).to_bytes(8, "little") + text.encode() for text in TRAIN)
    assert only["files"] == [[name, len(content), hashlib.sha256(content).hexdigest()]]
    assert answers["again"]["documents"] == only["documents"][18:]
    assert answers["again"]["files"] == only["files"]
    assert answers["again"]["parts"] in ([TRAIN, []], [[], TRAIN])
    assert answers["by commit"]["documents"] == only["documents"]
    assert answers["again"]["fingerprint"] == only["fingerprint"] == answers["by commit"]["fingerprint"]
    assert only["fingerprint"] != answers["split"]["fingerprint"]
    assert texts(answers["split"]) == TEST
    assert answers["not streamed"]["documents"] == only["documents"]
    for name in ("older", "older, streamed"):
        assert texts(answers[name]) == TEST
        assert answers[name]["files"][0][0].startswith(f"hf://org/one@{COMMIT[::-1]}/default/train/")
    assert "the splits are train, test; choose with split (--split)" in answers["two splits"]["error"]


def test_all_columns(answers: dict[str, dict[str, Any]]) -> None:
    rows = [{"text": text, "n": i} for i, text in enumerate(TRAIN)]
    assert answers["all columns"]["fields"] == answers["all columns, streamed"]["fields"] == rows
    assert answers["all columns"]["documents"] == answers["only split"]["documents"]
    assert answers["only split"]["fields"] == [None] * len(TRAIN)


def test_slices(answers: dict[str, dict[str, Any]]) -> None:
    assert texts(answers["percent"]) == TRAIN[:2]
    assert answers["percent"]["files"][0][0] == f"hf://org/two@{COMMIT}/default/train[:10%]/0-2"
    assert texts(answers["percents"]) == TRAIN[5:15]
    assert texts(answers["rows"]) == TRAIN[5:8]
    assert texts(answers["last rows"]) == TRAIN[-2:]
    assert texts(answers["sum"]) == TRAIN + TEST
    assert "cannot read hf://org/two: Unknown split" in answers["no such split"]["error"]


def test_streams(answers: dict[str, dict[str, Any]]) -> None:
    whole = answers["streamed"]
    assert texts(whole) == TRAIN
    parts = [f"hf://org/two@{COMMIT}/default/train/part-{i}-of-2" for i in (0, 1)]
    assert [document[1:] for document in whole["documents"]] == [
        *([f"{parts[0]}#{i}", 0, i] for i in range(1, 13)),
        *([f"{parts[1]}#{i}", 1, i] for i in range(1, 9)),
    ]
    later = answers["streamed from a point"]
    assert later["documents"] == whole["documents"][8:]
    assert later["files"] == whole["files"]
    assert later["parts"] == [TRAIN[:12], TRAIN[12:]]
    name = f"hf://org/two@{COMMIT}/default/train[5:18]"
    assert answers["streamed rows"]["documents"] == [[TRAIN[i], f"{name}#{i + 1}", 0, i - 4] for i in range(7, 18)]
    assert texts(answers["streamed to the end"]) == TRAIN[5:]
    assert texts(answers["streamed percent, size told"]) == TRAIN[10:15]
    assert "the hub does not report the number of rows of train" in answers["streamed percent"]["error"]


def test_configurations(answers: dict[str, dict[str, Any]]) -> None:
    assert texts(answers["configuration"]) == TEST
    assert texts(answers["streamed configuration"]) == TRAIN
    assert answers["configuration"]["files"][0][0] == f"hf://org/configs@{COMMIT}/de/train/0-7"
    assert "Config name is missing" in answers["no configuration"]["error"]
    assert "'en', 'de'" in answers["no configuration"]["error"]


def test_ids(answers: dict[str, dict[str, Any]]) -> None:
    for name in ("ids", "streamed ids"):
        assert texts(answers[name]) == [[1], [], [70000]]
        assert answers[name]["skipped"] == {"ids that the attention mask hides": 1}
    for name in ("no column", "streamed, no column"):
        assert "no field 'text' (found fields 'input_ids', 'attention_mask')" in answers[name]["error"]
        assert "tokens_field='input_ids'" in answers[name]["error"]


def test_long_splits_are_read_in_runs_that_ranks_share(answers: dict[str, dict[str, Any]]) -> None:
    many = answers["many"]
    name = f"hf://org/two@{COMMIT}/default/train"
    assert [file[0] for file in many["files"]] == [f"{name}/8-16", f"{name}/16-20"]
    assert many["documents"] == [
        *([TRAIN[i], f"{name}/8-16#{i + 1}", 1, i - 7] for i in (14, 15)),
        *([TRAIN[i], f"{name}/16-20#{i + 1}", 2, i - 15] for i in range(16, 20)),
    ]
    assert many["parts"] == [TRAIN[:8], TRAIN[8:]]
    assert many["n_files"] == 3


def test_bad_rows(answers: dict[str, dict[str, Any]]) -> None:
    assert f"hf://org/nulls@{COMMIT}/default/train/0-3#2: field 'text' is null" in answers["nulls"]["error"]
    left = answers["nulls left out"]
    assert (texts(left), left["skipped"]) == (["a", "c"], {"null": 1})
    assert [document[3] for document in left["documents"]] == [1, 3]


def test_files_by_their_names(answers: dict[str, dict[str, Any]]) -> None:
    assert texts(answers["file"]) == TRAIN[15:]
    assert texts(answers["script's files"]) == TEST  # how datasets with a loading script are read nowadays
    assert "scripts are no longer supported" in answers["script"]["error"]


def test_errors_of_the_hub(answers: dict[str, dict[str, Any]]) -> None:
    expected = {
        "unknown": "hf://org/nothing: it is private, gated, or not there, and no token was sent",
        "private": "hf://org/private: it is private, gated, or not there",
        "no such revision": "hf://org/one@nowhere: there is no such repository or revision on the hub",
        "broken data": "cannot read hf://org/broken",
        "bad setting": r"unknown setting 'splt'; there are config, split, revision, streaming",
        "bad value": "streaming = '1': give true or false",
        "bad name": r"a dataset is named hf://org/name; single files are named hf://datasets/org/name/file",
    }
    for name, message in expected.items():
        assert re.search(message, answers[name]["error"], re.DOTALL), (name, answers[name])


def test_answers_of_another_form(answers: dict[str, dict[str, Any]]) -> None:
    """They make the libraries raise what a bug would raise, but they are the hub's fault and no traceback's matter."""
    for i in range(5):
        assert f"cannot read hf://org/odd{i}: " in answers[f"odd list {i}"]["error"]
        assert (
            f"cannot read hf://datasets/org/odd{i}/data: the server answers"
            in answers[f"files of odd list {i}"]["error"]
        )


@pytest.mark.slow
def test_no_token_goes_to_a_proxy(hub, answers: dict[str, dict[str, Any]]) -> None:
    """The hub is the proxy before an endpoint of this machine, where nobody is; all libraries ask through it."""
    hub.tokens.clear()
    environ = {"HF_ENDPOINT": "http://localhost:1", "http_proxy": f"http://127.0.0.1:{hub.port}", "no_proxy": ""}
    environ |= {"HF_TOKEN": "hf_right", "HF_HOME": str(hub.home / "behind-a-proxy")}
    cases = [CASES["streamed"], CASES["file"], CASES["private"]]
    out = hub.run(str(Path(__file__).with_name("hub_reads.py")), given=json.dumps(cases), **environ)
    streamed, file, private = map(json.loads, out.splitlines())
    assert (texts(streamed), texts(file)) == (TRAIN, TRAIN[15:])
    assert "no token is sent to a proxy: set NO_PROXY=localhost" in private["error"]
    assert hub.tokens == {""}


def test_folders_that_datasets_saved(answers: dict[str, dict[str, Any]]) -> None:
    from lt_data import DocumentReader, SourceOptions

    folder, shuffled = Path(answers["saved"]["folder"]), answers["saved"]["shuffled"]
    reader = DocumentReader([folder / "plain"])
    assert [d.text for d in reader] == TRAIN
    assert reader.n_files == 3
    assert [d.text for d in reader.documents_from(1, 2)] == TRAIN[9:]
    assert [d.text for d in DocumentReader([folder / "shuffled"])] == shuffled != TRAIN[:10]
    assert [d.text for d in DocumentReader([folder / "several"], SourceOptions(split="train"))] == TRAIN
    assert [d.text for d in DocumentReader([folder / "several"], SourceOptions(split="test"))] == [TRAIN[3]]


@pytest.mark.slow
def test_without_network_the_cache_is_read(hub, answers: dict[str, dict[str, Any]]) -> None:
    assert answers["rows"]
    asked = len(hub.asked)
    cases = [{"sources": [f"hf://org/two@{COMMIT}?split=train[5:8]"]}, {"sources": ["hf://org/nothing"]}]
    out = hub.run(str(Path(__file__).with_name("hub_reads.py")), given=json.dumps(cases), HF_HUB_OFFLINE="1")
    found, lost = map(json.loads, out.splitlines())
    assert texts(found) == TRAIN[5:8]
    assert found["documents"] == answers["rows"]["documents"]
    assert "cannot read hf://org/nothing" in lost["error"]
    assert len(hub.asked) == asked
