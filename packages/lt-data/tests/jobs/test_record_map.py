"""`--map module:function`: what it gets and returns, how it is counted, and that a changed one never resumes."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lt_data import DataError, Document, TokenStore, prepare

CODE = """
from lt_data import LeftOut

def select(record, *, least=0, suffix=""):
    if "bad" in record["text"]:
        return None
    if record["score"] < least:
        return LeftOut("low score")
    return {"text": record["text"].upper() + suffix}

def shorten(record):
    return {**record, "input_ids": record["input_ids"][:2]}

def raises(record):
    return record["missing"]

def returns_text(record):
    return record["text"]

def renames(record):
    return {"content": record["text"]}

def counts(record):
    return LeftOut(record["url"])

NUMBER = 7
"""


@pytest.fixture
def module(fast_path, monkeypatch) -> str:
    """A module of the functions above, found in the working directory."""
    monkeypatch.chdir(fast_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    name = f"filter_{fast_path.name}"
    Path(f"{name}.py").write_text(CODE)
    return name


@pytest.fixture
def rows(fast_path) -> list[dict[str, Any]]:
    rows = [{"text": f"text {i}" + " bad" * (i % 5 == 0), "score": i % 7, "url": f"u{i}"} for i in range(200)]
    (fast_path / "in").mkdir()
    for first in range(0, 200, 50):
        lines = [json.dumps(row) for row in rows[first : first + 50]]
        (fast_path / f"in/{first:03d}.jsonl").write_text("\n".join(lines))
    return rows


def texts_of(path: Path) -> list[str]:
    store = TokenStore(path)
    tokenizer = store.tokenizer()
    return [tokenizer.decode(store[i], skip_special_tokens=True) for i in range(store.n_documents)]


@pytest.mark.usefixtures("small_batches")
def test_selects_and_changes_with_any_number_of_workers(fast_path, module, rows, tokenizer, contents):
    options: dict[str, Any] = {"record_map": f"{module}:select", "map_args": {"least": 3}, "shard_tokens": 300}
    manifest = prepare(["in"], tokenizer=tokenizer, out="store", **options)
    wanted = [row for row in rows if "bad" not in row["text"]]
    assert texts_of(fast_path / "store") == [row["text"].upper() for row in wanted if row["score"] >= 3]
    amounts = {reason: (amount.documents, amount.text_bytes) for reason, amount in manifest.left_out.items()}
    bad = [row for row in rows if "bad" in row["text"]]
    low = [row for row in wanted if row["score"] < 3]
    assert amounts == {
        "map": (len(bad), sum(len(row["text"]) for row in bad)),
        "map: low score": (len(low), sum(len(row["text"]) for row in low)),
    }
    assert manifest.read.documents == 200
    assert manifest.map is not None
    assert (manifest.map.function, manifest.map.arguments) == (f"{module}:select", {"least": 3})
    prepare(["in"], tokenizer=tokenizer, out="two", workers=2, **options)
    assert contents(fast_path / "two") == contents(fast_path / "store")
    units = prepare(["in"], tokenizer=tokenizer, out="units", workers=2, unit_bytes=3000, **options)
    assert (units.map, units.left_out, units.tokens) == (manifest.map, manifest.left_out, manifest.tokens)
    prepare(["in"], tokenizer=tokenizer, out="plain")
    assert "map" not in json.loads((fast_path / "plain/manifest.json").read_text())


@pytest.mark.usefixtures("rows")
def test_a_changed_function_never_resumes(fast_path, module, tokenizer, contents, monkeypatch):
    job: dict[str, Any] = {"tokenizer": tokenizer, "record_map": f"{module}:select", "unit_bytes": 3000}
    prepare(["in"], out="whole", **job)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(["in"], out="store", progress=interrupt, **job)
    with pytest.raises(DataError, match=r"map \(arguments\) was \{\} and is \{'least': 1\}"):
        prepare(["in"], out="store", map_args={"least": 1}, **job)
    with pytest.raises(DataError, match=r"map \(function\) was filter_.* and is None"):
        prepare(["in"], out="store", **{**job, "record_map": None})
    (fast_path / f"{module}.py").write_text(CODE + "# changed\n")
    with pytest.raises(DataError, match="its code was changed after it was imported; start Python again"):
        prepare(["in"], out="store", **job)
    with monkeypatch.context() as patch:
        patch.setattr("lt_data.preparation.record_map._imported", {})  # as a new process
        with pytest.raises(DataError, match=r"other settings: map \(sha256\) was [0-9a-f]{64} and is"):
            prepare(["in"], out="store", **job)
    (fast_path / f"{module}.py").write_text(CODE)
    prepare(["in"], out="store", **job)
    assert contents(fast_path / "store") == contents(fast_path / "whole")


def test_the_hash_is_of_the_whole_package(fast_path, module, tokenizer, monkeypatch):
    package = fast_path / f"package_{module}"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "words.py").write_text("WORDS = ['bad']\n")
    (package / "rules.py").write_text("from .words import WORDS\ndef keep(record):\n    return record\n")

    def sha256(out: str) -> str:
        monkeypatch.setattr("lt_data.preparation.record_map._imported", {})
        record_map = f"{package.name}.rules:keep"
        document = Document(text="one", source="x")
        manifest = prepare([document], tokenizer=tokenizer, out=out, record_map=record_map)
        assert manifest.map is not None
        return manifest.map.sha256

    first = sha256("one")
    assert sha256("same") == first
    (package / "words.py").write_text("WORDS = ['worse']\n")
    assert sha256("other") != first


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        ("{m}", {}, "write it as module:function"),
        ("no_such_module_here:f", {}, "cannot be imported: No module named 'no_such_module_here'; install the module"),
        ("{m}:absent", {}, "has no absent; write it as module:function"),
        ("{m}:NUMBER", {}, "int, not a function; write it as module:function"),
        ("builtins:dict", {}, "has no file whose hash could be recorded"),
        ("{m}:select", {"least": {1}}, "map_args are not JSON values"),
        ("{m}:select", {"least": float("nan")}, "map_args are not JSON values"),
        ("{m}:select", {"most": 1}, r"000\.jsonl:1: map = .* raised TypeError: .*unexpected keyword argument 'most'"),
        ("{m}:raises", {}, r"000\.jsonl:1: map = .* raised KeyError: 'missing' \(filter_.*\.py:15\); correct the func"),
        ("{m}:returns_text", {}, r"returned str; return a record \(dict\), None or LeftOut"),
        ("{m}:renames", {}, r"returned a record with no field 'text' \(found fields 'content'\)"),
        ("{m}:counts", {}, r"\.jsonl:\d+: .*more than 100 reasons; return categories"),
        ("broken:f", {}, "importing it raised ZeroDivisionError"),
    ],
)
def test_errors_name_the_function(fast_path, module, tokenizer, function, arguments, message):
    Path("broken.py").write_text("1 / 0")
    with pytest.raises(DataError, match=message):
        prepare(["in"], tokenizer=tokenizer, out="store", record_map=function.format(m=module), map_args=arguments)
    assert not list(fast_path.glob("store*"))
