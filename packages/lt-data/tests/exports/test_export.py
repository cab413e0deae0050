"""Common behavior of all formats: options, disk space, atomic folders, synced files, manifest, refusals."""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lt_data import DataError, Document, Tokenizer, TokenStore, prepare, storage, train_bpe
from lt_data.exports import disk_space
from lt_data.exports.export import export
from lt_data.exports.import_tokens import ImportOptions, import_tokens
from lt_data.exports.options import ExportOptions

SHAPES: list[dict[str, Any]] = [
    {"to": "hf"},
    {"to": "hf", "seq_len": 64},
    {"to": "megatron"},
    {"to": "smp"},
    {"to": "litespark", "seq_len": 64},
]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "parquet"}, "to = 'parquet': one of hf, megatron, smp, litespark"),
        ({"to": "litespark"}, "to = litespark: its rows have a fixed length; give seq_len"),
        ({"to": "megatron", "seq_len": 4}, "seq_len: has no effect with to = megatron"),
        ({"to": "hf", "seq_len": 0}, "seq_len = 0: from 1 to"),
        ({"to": "hf", "seq_len": 4, "packing": "ffd"}, "packing = 'ffd': one of concat, bfd"),
        ({"to": "hf", "packing": "bfd"}, "apply to rows; give seq_len"),
        ({"to": "smp", "last_row": "drop"}, "apply to rows; give seq_len"),
        ({"to": "litespark", "seq_len": 4, "packing": "bfd"}, "packing = bfd: litespark has no mask; choose concat"),
        (
            {"to": "smp", "seq_len": 4, "packing": "bfd", "last_row": "drop"},
            "last_row = drop: any row of packing = bfd",
        ),
        ({"to": "smp", "seq_len": 4, "labels": "copy"}, "labels = copy: smp has no labels"),
        ({"to": "hf", "seq_len": 4, "labels": "copy"}, "would train on padding"),
        (
            {"to": "smp", "seq_len": 4, "packing": "bfd", "document_boundaries": "seq_lengths"},
            "document_boundaries: applies to to = hf with packing = bfd",
        ),
        (
            {"to": "hf", "seq_len": 4, "document_boundaries": "seq_lengths"},
            "document_boundaries: applies to to = hf with packing = bfd",
        ),
        ({"to": "hf", "split": "dev"}, "split = 'dev': one of train, validation, test"),
        ({"to": "hf", "file_bytes": 0}, "file_bytes = 0: at least 1"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        ExportOptions(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "parquet"}, "format = 'parquet': one of hf"),
        ({"format": "litespark"}, "has no document boundaries; give boundaries"),
        ({"format": "litespark", "boundaries": "lines"}, "boundaries = 'lines': one of bos, eos, rows, files"),
        ({"format": "hf", "boundaries": "eos"}, "boundaries = 'eos': has no effect with format = hf"),
        ({"format": "megatron", "field": "ids"}, "field = 'ids': has no effect with format = megatron"),
        ({"format": "litespark", "boundaries": "eos", "seq_len": 4}, "seq_len = 4: has no effect"),
        ({"format": "hf", "token_bytes": 2}, "token_bytes = 2: has no effect"),
        ({"format": "smp", "pad_id": 0}, "pad_id = 0: has no effect"),
        ({"format": "litespark", "boundaries": "rows", "seq_len": 0}, "seq_len = 0: at least 1"),
    ],
)
def test_options_of_an_import_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        ImportOptions(**options)


@pytest.mark.parametrize("shape", SHAPES)
def test_room_is_asked_for_first(
    shape: dict[str, Any], store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Just too little is refused and nothing is made; what is asked for is no more than what is written."""
    report = export(store, out=tmp_path / "fits", options=ExportOptions(**shape))
    usage = namedtuple("usage", "total used free")
    free = 100
    monkeypatch.setattr(disk_space.shutil, "disk_usage", lambda path: usage(0, 0, free))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(DataError, match=r"out = .*deep/out: needs .*B, but 100B are free at .*; free some space"):
        export(store, out=tmp_path / "deep" / "out", options=ExportOptions(**shape))
    assert sorted(tmp_path.iterdir()) == before
    free = report.bytes
    export(store, out=tmp_path / "deep" / "out", options=ExportOptions(**shape))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_full_disk_leaves_nothing(
    shape: dict[str, Any], store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever write fails, from the first to the last."""
    write, calls = storage.write, 0

    def counting(file: Any, content: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == fail_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(file, content)

    fail_at = -1
    monkeypatch.setattr("lt_data.exports.files.write", counting)
    options = ExportOptions(**shape, file_bytes=20_000)
    export(store, out=tmp_path / "whole", options=options)
    total, before = calls, sorted(tmp_path.iterdir())
    assert total >= 2
    for number in {1, 2, total // 2, total}:
        calls, fail_at = 0, number
        with pytest.raises(DataError, match=r"cannot write .*: No space left on device; free some space"):
            export(store, out=tmp_path / "out", options=options)
        assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("shape", SHAPES)
def test_every_file_is_synced_before_the_folder_has_its_name(
    shape: dict[str, Any], store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: dict[int, int] = {}

    def watch(descriptor: int) -> None:
        found = os.fstat(descriptor)
        assert not (tmp_path / "out").exists() or found.st_ino == tmp_path.stat().st_ino
        synced[found.st_ino] = found.st_size

    monkeypatch.setattr(storage, "fsync", watch)
    monkeypatch.setattr("lt_data.exports.files.fsync", watch)
    export(store, out=tmp_path / "out", options=ExportOptions(**shape))
    made = [tmp_path, tmp_path / "out", *(tmp_path / "out").rglob("*")]
    for path in made:
        assert path.stat().st_ino in synced, path
        assert path.is_dir() or synced[path.stat().st_ino] == path.stat().st_size, path


@pytest.mark.parametrize("shape", SHAPES)
def test_the_note_lists_every_file(shape: dict[str, Any], store: TokenStore, tmp_path: Path) -> None:
    report = export(store, out=tmp_path / "out", options=ExportOptions(**shape))
    found = sorted(path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*.*"))
    assert report.files == len(found)
    assert report.bytes == sum((tmp_path / "out" / name).stat().st_size for name in found)
    if shape["to"] == "smp":
        assert "lt-export.json" not in found
        return
    note = json.loads((tmp_path / "out" / "lt-export.json").read_text())
    assert sorted([*(file["path"] for file in note["files"]), "lt-export.json"]) == found
    for file in note["files"]:
        content = (tmp_path / "out" / file["path"]).read_bytes()
        assert (file["bytes"], file["sha256"]) == (len(content), hashlib.sha256(content).hexdigest())
    assert note["store"] == store.manifest.fingerprint
    assert (note["tokens"], note["padding"]) == (store.n_tokens, report.padding)


@pytest.mark.parametrize("kind", ["file", "folder", "export"])
def test_what_stands_there_is_not_touched(kind: str, store: TokenStore, tmp_path: Path) -> None:
    out = tmp_path / "out"
    if kind == "file":
        out.write_text("mine")
    elif kind == "folder":
        out.mkdir()
        (out / "mine").touch()
    else:
        export(store, out=out, options=ExportOptions(to="smp"))
    before = {path: path.stat().st_mtime_ns for path in (out, *out.rglob("*"))}
    with pytest.raises(DataError, match="exists and is not an empty folder"):
        export(store, out=out, options=ExportOptions(to="smp"))
    assert {path: path.stat().st_mtime_ns for path in (out, *out.rglob("*"))} == before


def test_an_empty_folder_is_taken_and_a_wrong_padding_is_not(store: TokenStore, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(DataError, match=r"pad_id = 300: the ids of this store are 0 to 299"):
        export(store, out=tmp_path / "out", options=ExportOptions(to="litespark", seq_len=8, pad_id=300))
    export(store, out=tmp_path / "out", options=ExportOptions(to="litespark", seq_len=8, pad_id=299))
    assert (tmp_path / "out" / "metadata.json").is_file()
    with pytest.raises(DataError, match=r"last_row = 'drop': \d+ tokens do not fill one row"):
        export(store, out=tmp_path / "big", options=ExportOptions(to="hf", seq_len=10**6, last_row="drop"))
    assert not (tmp_path / "big").exists()


def test_an_import_asks_the_note(
    store: TokenStore, tmp_path: Path, tokenizer: Tokenizer, wide_tokenizer: Tokenizer
) -> None:
    export(store, out=tmp_path / "out", options=ExportOptions(to="litespark", seq_len=64))

    def refused(message: str, format: str = "litespark", with_: Tokenizer = tokenizer) -> None:
        boundaries = "eos" if format == "litespark" else None
        options = ImportOptions(format=format, boundaries=boundaries)
        with pytest.raises(DataError, match=message):
            import_tokens(tmp_path / "out", options=options, tokenizer=with_, out=tmp_path / "back")
        assert not (tmp_path / "back").exists()

    refused("this is litespark, not megatron", format="megatron")
    refused("made with another tokenizer than wide", with_=wide_tokenizer)
    note = tmp_path / "out" / "lt-export.json"
    content = note.read_text()
    data = tmp_path / "out" / "train" / "tokens_shard_000000.ds"
    whole = data.read_bytes()
    for damaged in (whole[:-130], bytes(len(whole)), whole[:-1] + bytes([whole[-1] ^ 1])):
        data.write_bytes(damaged)
        refused(r"tokens_shard_000000\.ds: \d+ bytes that are not .* SHA-256 in lt-export\.json: copy it again")
    data.unlink()
    refused(r"cannot read the exported file .*tokens_shard_000000\.ds: No such file")
    note.write_text(content.replace('"version": 1', '"version": 2'))
    refused("another format version")
    note.write_text("[]")
    refused(r"lt-export\.json: holds a list, not an object; export again")


def test_one_split_of_an_export_is_the_export(store: TokenStore, tmp_path: Path, tokenizer: Tokenizer) -> None:
    """The manifest is in the parent folder: the padding of the last row is still known."""
    report = export(store, out=tmp_path / "out", options=ExportOptions(to="litespark", seq_len=64))
    assert report.padding > 0
    options = ImportOptions(format="litespark", boundaries="eos")
    done = import_tokens(tmp_path / "out" / "train", options=options, tokenizer=tokenizer, out=tmp_path / "back")
    assert (done.padding, TokenStore(tmp_path / "back").n_tokens) == (report.padding, store.n_tokens)


@pytest.mark.parametrize("to", ["hf", "megatron"])
def test_a_missing_sample_is_noticed(to: str, store: TokenStore, tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Its files are complete, but its manifest counts one token more."""
    export(store, out=tmp_path / "out", options=ExportOptions(to=to))
    note = tmp_path / "out" / "lt-export.json"
    values = json.loads(note.read_text())
    note.write_text(json.dumps({**values, "tokens": values["tokens"] + 1}))
    with pytest.raises(DataError, match=rf"{store.n_tokens} tokens and 0 of padding, lt-export\.json says"):
        import_tokens(tmp_path / "out", options=ImportOptions(format=to), tokenizer=tokenizer, out=tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.slow
def test_a_long_document_is_exported_in_bounded_memory(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Six million ids in one document, as JSON: peak memory stays near that of many short ones."""
    ids = np.tile(np.arange(300, dtype=np.int32), 20_000)
    documents = [Document(ids=ids, source="long"), *(Document(ids=ids[:1000], source=str(i)) for i in range(1000))]
    prepare(documents, tokenizer=tokenizer, out=tmp_path / "store", bos=False, eos=False)
    script = (
        "import resource, sys\n"
        "from lt_data.exports.export import export\n"
        "from lt_data.exports.options import ExportOptions\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "store, out = sys.argv[1:]\n"
        "export(store, out=out + '/a', options=ExportOptions(to='smp', seq_len=64, gz=False, file_bytes=1000000))\n"
        "before = peak()\n"
        "export(store, out=out + '/b', options=ExportOptions(to='smp', gz=False))\n"
        "print(peak() - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "store"), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    # The ids of the long document as Python integers and text would be more than 300 MB.
    assert int(done.stdout) < 60_000
    assert (tmp_path / "b" / "part-00000.json").stat().st_size > 4 * ids.size
    shutil.rmtree(tmp_path / "b")


@pytest.mark.parametrize("shape", [{"to": "hf"}, {"to": "litespark", "seq_len": 64}])
@pytest.mark.parametrize("at", [1, -1])
def test_kill_9_leaves_no_export_and_the_next_run_makes_it(
    shape: dict[str, Any], at: int, store: TokenStore, tmp_path: Path
) -> None:
    """Killed inside the first write, and when all is written and only the name is missing."""
    options = {**shape, "file_bytes": 20_000}
    script = (
        "import json, os, signal, sys\n"
        "from lt_data import storage\n"
        "from lt_data.exports import files\n"
        "from lt_data.exports.export import export\n"
        "from lt_data.exports.options import ExportOptions\n"
        "def die(*_, **__): os.kill(os.getpid(), signal.SIGKILL)\n"
        "store, out, options, at = sys.argv[1:]\n"
        "if at == '1': files.write = lambda file, content: (file.write(content[:3]), die())\n"
        "else: storage._replace_folder = die\n"
        "export(store, out=out, options=ExportOptions(**json.loads(options)))\n"
    )
    out = tmp_path / "out"
    command = [sys.executable, "-c", script, str(store.path), str(out), json.dumps(options), str(at)]
    assert subprocess.run(command, check=False).returncode == -9
    assert not out.exists()
    export(store, out=out, options=ExportOptions(**options))
    export(store, out=tmp_path / "undisturbed", options=ExportOptions(**options))
    files = sorted(path.relative_to(out) for path in out.rglob("*.*"))
    assert files == sorted(
        path.relative_to(tmp_path / "undisturbed") for path in (tmp_path / "undisturbed").rglob("*.*")
    )
    for file in files:
        assert (out / file).read_bytes() == (tmp_path / "undisturbed" / file).read_bytes()


def test_kill_9_of_an_import_and_an_error_leave_the_way_free(
    store: TokenStore, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    export(store, out=tmp_path / "out", options=ExportOptions(to="smp", gz=False))
    script = (
        "import os, signal, sys\n"
        "from lt_data.exports import import_tokens as module, smp\n"
        "def read(path, field):\n"
        "    for i, found in enumerate(smp.read(path, field)):\n"
        "        if i == 40: os.kill(os.getpid(), signal.SIGKILL)\n"
        "        yield found\n"
        "module._READ_SAMPLES['smp'] = read\n"
        "source, tokenizer, out = sys.argv[1:]\n"
        "options = module.ImportOptions(format='smp')\n"
        "module.import_tokens(source, options=options, tokenizer=tokenizer, out=out, shard_tokens=500)\n"
    )
    command = [sys.executable, "-c", script, tmp_path / "out", store.path / "tokenizer", tmp_path / "back"]
    assert subprocess.run([*map(str, command)], check=False).returncode == -9
    assert not (tmp_path / "back").exists()
    data = tmp_path / "out" / "part-00000.json"
    whole = data.read_text()
    options = ImportOptions(format="smp")
    data.write_text(whole + "{}\n")
    with pytest.raises(DataError, match=f"part-00000.json:{store.n_documents + 1}: no field 'input_ids'"):
        import_tokens(tmp_path / "out", options=options, tokenizer=tokenizer, out=tmp_path / "back", shard_tokens=500)
    assert not (tmp_path / "back").exists()
    data.write_text(whole)
    for name in ("back", "undisturbed"):
        import_tokens(tmp_path / "out", options=options, tokenizer=tokenizer, out=tmp_path / name, shard_tokens=500)
    files = sorted(path.relative_to(tmp_path / "back") for path in (tmp_path / "back").rglob("*.*"))
    assert len(files) > 20
    for file in files:
        assert (tmp_path / "back" / file).read_bytes() == (tmp_path / "undisturbed" / file).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "out", "store", "undisturbed"]


def test_padding_of_a_tokenizer_that_names_no_id_for_it_is_0(texts: list[str], tmp_path: Path) -> None:
    bare = train_bpe(texts, vocab_size=300, special_tokens=())
    documents = [Document(text=text, source="text") for text in texts[:3]]
    prepare(documents, tokenizer=bare, out=tmp_path / "store", bos=False, eos=False)
    store = TokenStore(tmp_path / "store")
    n = store.n_tokens
    export(store, out=tmp_path / "out", options=ExportOptions(to="litespark", seq_len=n + 9))
    found = np.fromfile(tmp_path / "out" / "train" / "tokens_shard_000000.ds", "<u2")
    np.testing.assert_array_equal(found, [*store.tokens(0, n), *[0] * 10])
