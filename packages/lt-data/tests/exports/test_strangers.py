"""Folders of others that are imported: deep or other JSON, names and links that lead outside, pipes."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lt_data import DataError, ExportOptions, ImportOptions, Tokenizer, TokenStore, export, import_tokens

DESCRIPTIONS = {
    "hf": "state.json",
    "litespark": "metadata.json",
    "megatron": "lt-export.json",
}
DEEP = b"[" * 100_000, b'{"a":' * 900 + b"1" + b"}" * 900


@pytest.fixture
def exported(store: TokenStore, tmp_path: Path, tokenizer: Tokenizer) -> Any:
    """Exports the store, and gives a function that imports it."""

    def make(to: Any) -> Any:
        folder = tmp_path / to
        seq_len = 64 if to in ("litespark", "smp") else None
        export(store, out=folder, options=ExportOptions(to=to, seq_len=seq_len))
        boundaries = "eos" if to == "litespark" else None
        options = ImportOptions(format=to, boundaries=boundaries)

        def load() -> Any:
            return import_tokens(folder, options=options, tokenizer=tokenizer, out=tmp_path / "imported")

        return folder, load

    return make


@pytest.mark.parametrize("to", [*DESCRIPTIONS, "smp"])
def test_deep_json(exported: Any, tmp_path: Path, to: str) -> None:
    folder, load = exported(to)
    if to == "smp":
        path = next(folder.glob("*.json.gz"))
        path.unlink()
        path = path.with_suffix("")
    else:
        path = folder / DESCRIPTIONS[to]
    for content in DEEP:
        path.write_bytes(content)
        with pytest.raises(DataError, match=rf"{path.name}(:1)?: "):
            load()
    assert not (tmp_path / "imported").exists()


@pytest.mark.parametrize("to", [*DESCRIPTIONS, "smp"])
def test_links_out_and_pipes(exported: Any, tmp_path: Path, to: str) -> None:
    folder, load = exported(to)
    path = max(folder.rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else -1)
    path.rename(tmp_path / "secret")
    path.symlink_to(tmp_path / "secret")
    with pytest.raises(DataError, match=rf"{path.name}: a symbolic link leads out of"):
        load()
    path.unlink()
    (tmp_path / "secret").rename(path)
    os.mkfifo(folder / "extra.json")
    with pytest.raises(DataError, match=r"extra\.json: not a regular file"):
        load()


@pytest.mark.parametrize(("to", "name"), [("smp", "in.json"), ("megatron", "in.idx")])
def test_a_pipe(tmp_path: Path, tokenizer: Tokenizer, to: Any, name: str) -> None:
    os.mkfifo(tmp_path / name)
    path = tmp_path / name.removesuffix(".idx")
    with pytest.raises(DataError, match="neither a file nor a folder"):
        import_tokens(path, options=ImportOptions(format=to), tokenizer=tokenizer, out=tmp_path / "out")


@pytest.mark.parametrize(
    ("to", "change", "message"),
    [
        ("hf", {"_data_files": [{"filename": ".."}]}, "'..' is not a file of this folder"),
        ("hf", {"_data_files": [{"filename": "/etc/passwd"}]}, "'/etc/passwd' is not a file of this folder"),
        ("hf", {"_data_files": "x"}, "not the state of a saved dataset"),
    ],
)
def test_other_descriptions(exported: Any, to: str, change: dict[str, Any], message: str) -> None:
    folder, load = exported(to)
    path = folder / DESCRIPTIONS[to]
    path.write_text(json.dumps(json.loads(path.read_bytes()) | change), encoding="utf-8")
    (folder / "lt-export.json").unlink(missing_ok=True)
    with pytest.raises(DataError, match=message):
        load()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": "3"}, "tokens is a string, not an integer"),
        ({"files": [{"path": "../x", "bytes": 1, "sha256": ""}]}, r"'\.\./x' is not the name of a file of the folder"),
        (
            {"files": [{"path": "/etc/passwd", "bytes": 1, "sha256": ""}]},
            "is not the name of a file of the folder",
        ),
        ({"seq_len": [1]}, "seq_len is a list, not an integer"),
        ({"other": 1}, "unknown field other"),
    ],
)
def test_other_export_manifests(exported: Any, change: dict[str, Any], message: str) -> None:
    folder, load = exported("megatron")
    path = folder / "lt-export.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | change), encoding="utf-8")
    with pytest.raises(DataError, match=rf"lt-export\.json: .*{message}; export again"):
        load()
