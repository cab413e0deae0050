"""Litespark's and Megatron's files, as their trainers read them and as stores; totals and hashes are compared."""

import json
import os
import struct
import tempfile
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lt_data import DataError, Document, Tokenizer, TokenStore, prepare
from lt_data.exports import job
from lt_data.exports.export import export
from lt_data.exports.import_tokens import import_tokens
from lt_data.exports.options import ExportOptions, ImportOptions

DOCUMENTS = st.lists(st.lists(st.integers(2, 299), min_size=1, max_size=40), min_size=1, max_size=12)
TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def contents(path: Path) -> list[list[int]]:
    store = TokenStore(path)
    return [store[i].tolist() for i in range(store.n_documents)]


@pytest.fixture
def load(tmp_path, tokenizer) -> Any:
    """Imports to a new folder; gives back the documents and the report."""

    def load(path: Path, tokenizer: Tokenizer = tokenizer, **options: Any) -> tuple[list[list[int]], Any]:
        out = tmp_path / f"store{len([*tmp_path.iterdir()])}"
        done = import_tokens(path, options=ImportOptions(**options), tokenizer=tokenizer, out=out)
        return contents(out), done

    return load


@pytest.fixture
def refuse(load, tmp_path) -> Any:
    def refuse(message: str, path: Path, **more: Any) -> None:
        before = sorted(tmp_path.glob("store*/manifest.json"))
        with pytest.raises(DataError, match=message):
            load(path, **more)
        assert sorted(tmp_path.glob("store*/manifest.json")) == before

    return refuse


@pytest.mark.parametrize("to", ["megatron", "litespark"])
@settings(max_examples=8)
@given(
    documents=DOCUMENTS, marked=st.booleans(), seq_len=st.integers(1, 60), file_bytes=st.sampled_from([1, 130, None])
)
def test_the_store_comes_back(tokenizer, to, documents, marked, seq_len, file_bytes):
    """With its fingerprint, and of Litespark also from the folder of its split alone."""
    blocks = to == "litespark"
    marked = marked or blocks  # what has no boundaries needs a mark of them
    options = ExportOptions(to=to, seq_len=seq_len if blocks else None, file_bytes=file_bytes)
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patched:
        patched.setattr(job, "BATCH_TOKENS", 50)  # so that a few documents are several batches
        folder = Path(name)
        given_ids = [Document(ids=np.array(ids), source=str(i)) for i, ids in enumerate(documents)]
        made = {"tokenizer": tokenizer, "shard_tokens": 60}
        prepare(given_ids, out=folder / "store", bos=marked, eos=marked, **made)
        store = TokenStore(folder / "store")
        report = export(store, out=folder / "out", options=options)
        assert (report.tokens, report.dropped_tokens) == (store.n_tokens, 0)
        for boundaries in ("bos", "eos") if blocks else (None,):
            back = folder / f"back-{boundaries}"
            path = folder / "out" / ("train" if boundaries == "eos" else "")
            options_ = ImportOptions(format=to, boundaries=boundaries)
            done = import_tokens(path, options=options_, out=back, **made)
            assert TokenStore(back).manifest.fingerprint == store.manifest.fingerprint
            assert done.padding == report.padding


@pytest.mark.parametrize("to", ["litespark", "megatron"])
def test_an_export_is_compared_with_its_list(to, store, tmp_path, wide_tokenizer, refuse):
    out, blocks = tmp_path / "out", to == "litespark"
    export(store, out=out, options=ExportOptions(to=to, seq_len=64 if blocks else None))
    right = {"format": to, "boundaries": "eos" if blocks else None}
    other = {"format": "megatron"} if blocks else {"format": "litespark", "boundaries": "eos"}
    refuse(f"says that this is {to}, not", out, **other)
    refuse("made with another tokenizer than wide", out, tokenizer=wide_tokenizer, **right)
    data = max(out.rglob("*.*"), key=lambda path: path.stat().st_size)
    whole = data.read_bytes()
    for damaged in (whole[:-130], bytes(len(whole)), whole[:-1] + bytes([whole[-1] ^ 1])):
        data.write_bytes(damaged)
        refuse(rf"{data.name}: its SHA-256 is not the one in lt-export\.json: copy it again", out, **right)
    data.unlink()
    refuse(rf"{data.name}: its SHA-256 is not the one", out, **right)
    os.mkfifo(data)
    refuse(rf"{data.name}: its SHA-256 is not the one", out, **right)
    data.unlink()
    data.write_bytes(whole)
    listed = out / "lt-export.json"
    values = json.loads(listed.read_text())
    for change, message in (
        ({"version": 1}, "another format version"),
        ({"tokens": "3"}, "tokens is a string, not an integer; export again"),
        ({"files": {"../x": ""}}, r"file name '\.\./x' leads out"),
        ({"tokens": values["tokens"] + 1, "padding": 0}, r" of padding, lt-export\.json says"),
    ):
        listed.write_text(json.dumps(values | change))
        refuse(message, out, **right)
    for content in ("[]", "[" * 100_000):
        listed.write_text(content)
        refuse(r"lt-export\.json: ", out, **right)


@pytest.mark.parametrize(("name", "token_bytes"), [("store", 2), ("wide_store", 4)])
def test_litespark_is_read_by_numpy(name, token_bytes, tmp_path, request):
    store: TokenStore = request.getfixturevalue(name)
    options = ExportOptions(to="litespark", seq_len=64, pad_id=3, file_bytes=4000, split="validation")
    report = export(store, out=tmp_path / "out", options=options)
    padding = -store.n_tokens % 65
    files = sorted((tmp_path / "out" / "validation").iterdir())
    assert [file.name for file in files] == [f"tokens_shard_{i:06d}.ds" for i in range(len(files))]
    assert len(files) > 2
    read = [np.fromfile(file, f"<u{token_bytes}") for file in files]
    assert all(part.size % 65 == 0 for part in read)  # no row in two files
    np.testing.assert_array_equal(np.concatenate(read), [*store.tokens(0, store.n_tokens), *[3] * padding])
    assert padding > 0
    metadata = json.loads((tmp_path / "out" / "metadata.json").read_text())
    stats = {"files": len(files), "total_size_bytes": sum(file.stat().st_size for file in files)}
    assert metadata["subset_stats"] == {"validation": stats}
    stated = ("sequence_length", "token_size_bytes", "total_sequences", "total_tokens", "vocab_size", "add_bos")
    rows = (store.n_tokens + padding) // 65
    assert [metadata[key] for key in stated] == [64, token_bytes, rows, rows * 65, store.vocab_size, True]
    assert (report.samples, report.tokens, report.padding) == (rows, store.n_tokens, padding)


def test_the_last_row_of_litespark_is_dropped_on_request(store, tmp_path, load):
    options = ExportOptions(to="litespark", seq_len=99, last_row="drop", file_bytes=700)
    report = export(store, out=tmp_path / "out", options=options)
    found, _ = load(tmp_path / "out", format="litespark", boundaries="files")
    assert [*chain(*found)] == store.tokens(0, report.tokens).tolist()
    assert (report.tokens + report.dropped_tokens, report.tokens % 100) == (store.n_tokens, 0)
    assert 0 < report.dropped_tokens < 100


def foreign_litespark(folder: Path, files: dict[str, list[int]], metadata: dict[str, object] | None) -> Path:
    (folder / "train").mkdir(parents=True)
    for name, ids in files.items():
        (folder / "train" / name).write_bytes(np.array(ids, "<u2").tobytes())
    if metadata is not None:
        (folder / "metadata.json").write_text(json.dumps(metadata))
    return folder


def test_litespark_of_others(tmp_path, load, refuse):
    """BOS 0 and EOS 1: each file for itself, with its remainder, as its documents were cut off at its end."""
    files = {
        "tokens_shard_000001.ds": [0, 8, 1, 0, 9, 9],
        "tokens_shard_000000_remainder.ds": [0, 7, 7],
        "tokens_shard_000000.ds": [0, 5, 6, 1, 0, 5, 1, 1, 1],
        "tokens_shard_000002.ds": [],
    }
    folder = foreign_litespark(tmp_path / "in", files, {"token_size_bytes": 2, "sequence_length": 2})

    def imported(**options: object) -> list[list[int]]:
        return load(folder, format="litespark", **options)[0]

    assert imported(boundaries="bos") == [[0, 5, 6, 1], [0, 5, 1, 1, 1], [0, 7, 7], [0, 8, 1], [0, 9, 9]]
    assert imported(boundaries="eos", pad_id=1) == [[0, 5, 6, 1], [0, 5, 1], [0, 7, 7], [0, 8, 1], [0, 9, 9]]
    assert imported(boundaries="rows") == [[0, 5, 6], [1, 0, 5], [1, 1, 1], [0, 7, 7], [0, 8, 1], [0, 9, 9]]
    assert imported(boundaries="files", pad_id=9) == [[0, 5, 6, 1, 0, 5, 1, 1, 1], [0, 7, 7], [0, 8, 1, 0]]
    given = {"format": "litespark", "boundaries": "bos"}
    refuse("9 ids, not a multiple of the row length 5", folder, format="litespark", boundaries="rows", seq_len=4)
    refuse(r"token_bytes = 3 .*: give 2 or 4", folder, **given, token_bytes=3)
    refuse(r"000000\.ds: 18 bytes, not a file of 4-byte tokens", folder, **given, token_bytes=4)
    (folder / "metadata.json").write_text("{")
    refuse(r"metadata\.json: not JSON", folder, **given)
    (folder / "metadata.json").unlink()
    refuse("token_bytes = None .*: give 2 or 4", folder, **given)
    refuse("unknown row length; give seq_len", folder, format="litespark", boundaries="rows", token_bytes=2)
    (folder / "test").mkdir()
    (folder / "test" / "tokens_shard_000000.ds").write_bytes(b"\0\0")
    refuse("holds the splits train, test; give one", folder, **given, token_bytes=2)
    refuse(r"no \.ds file", tmp_path, **given, token_bytes=2)


def test_documents_of_our_litespark_go_on_across_its_files(store, tmp_path, load):
    export(store, out=tmp_path / "out", options=ExportOptions(to="litespark", seq_len=7, file_bytes=160))
    assert len([*(tmp_path / "out" / "train").iterdir()]) > 100
    found, _ = load(tmp_path / "out", format="litespark", boundaries="bos")
    assert found == contents(store.path)
    (tmp_path / "out" / "lt-export.json").unlink()
    cut, _ = load(tmp_path / "out", format="litespark", boundaries="bos")
    assert len(cut) > len(found)


def test_totals_of_litespark_are_compared(tmp_path, load, refuse):
    """Total sizes of each split, and the tokens of all of them; a split may be copied without the others."""
    stats = {"train": {"files": 2, "total_size_bytes": 12}, "test": {"files": 1, "total_size_bytes": 6}}
    metadata = {"token_size_bytes": 2, "sequence_length": 2, "total_tokens": 9, "subset_stats": stats}
    files = {"tokens_shard_000000.ds": [5, 6, 7], "tokens_shard_000001.ds": [8, 9, 10]}
    folder = foreign_litespark(tmp_path / "in", files, metadata)
    options = {"format": "litespark", "boundaries": "rows"}
    for path in (folder, folder / "train"):
        for changes in ({}, {"total_tokens": 6, "subset_stats": {}}):
            (folder / "metadata.json").write_text(json.dumps(metadata | changes))
            assert load(path, **options)[0] == [[5, 6, 7], [8, 9, 10]]
        for changes, message in (
            ({"total_tokens": 12}, "total_tokens is 12, but there are 9; copy or prepare the files again"),
            ({"total_tokens": 9, "subset_stats": {}}, "total_tokens is 9, but there are 6"),
            ({"subset_stats": [3]}, "not the description of Litespark's data"),
            ({"subset_stats": {"train": 3}}, "not the description of Litespark's data"),
        ):
            (folder / "metadata.json").write_text(json.dumps(metadata | changes))
            refuse(rf"metadata\.json: {message}", path, **options)
    (folder / "metadata.json").write_text(json.dumps(metadata))
    (folder / "train" / "tokens_shard_000001.ds").write_bytes(b"")
    refuse(r"metadata\.json: total_size_bytes of train is 12, but there are 6", folder, **options)


# Megatron


def write_dataset(folder: Path, sequences: list[list[int]], boundaries: list[int], code: int, gap: int = 0) -> None:
    """A dataset as Megatron's builder writes it; with `gap` bytes before each sequence."""
    folder.mkdir(exist_ok=True)
    content, pointers = b"", []
    for sequence in sequences:
        content += b"\xff" * gap
        pointers.append(len(content))
        content += np.array(sequence, TYPES[code]).tobytes()
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sequences), len(boundaries))
    index += np.array([len(sequence) for sequence in sequences], "<i4").tobytes()
    index += np.array(pointers, "<i8").tobytes() + np.array(boundaries, "<i8").tobytes()
    (folder / "x_text.document.bin").write_bytes(content)
    (folder / "x_text.document.idx").write_bytes(index)


@pytest.mark.parametrize("code", [4, 5, 8])
def test_a_megatron_dataset_of_others_is_imported(tmp_path, wide_tokenizer, code, load, refuse):
    """Documents of several sequences and of none, a sequence of none, sequences that do not touch."""
    high = 65_000 if code == 8 else 69_000
    write_dataset(tmp_path / "in", [[1, high], [3], [], [4, 5], [6]], [0, 2, 2, 4, 5], code, gap=8)
    given = {"tokenizer": wide_tokenizer, "format": "megatron"}
    for name in ("", "x_text.document", "x_text.document.idx", "x_text.document.bin"):
        found, done = load(tmp_path / "in" / name, **given)
        assert found == [[1, high, 3], [4, 5], [6]]
        assert done.manifest.empty_documents == 1
    marked, _ = load(tmp_path / "in", bos=True, eos=True, **given)
    assert marked == [[69_998, 1, high, 3, 69_999], [69_998, 4, 5, 69_999], [69_998, 6, 69_999]]
    (tmp_path / "in" / "y.idx").touch()
    refuse(r"one \.idx file is needed, found \['x_text\.document\.idx', 'y\.idx'\]", tmp_path / "in", **given)
    refuse(r"one \.idx file is needed, found \['z\.idx'\]", tmp_path / "in" / "z", **given)
    with (tmp_path / "in" / "x_text.document.bin").open("ab") as file:
        file.write(b"\0")
    refuse("not a whole number of tokens", tmp_path / "in" / "x_text.document", **given)


@pytest.mark.parametrize(
    ("at", "kind", "value", "message"),
    [
        (0, "<B", 0, "not a Megatron index"),
        (9, "<Q", 2, "version 2, type 8"),
        (17, "<B", 7, "version 1, type 7"),
        (18, "<Q", 4, "102 bytes do not match 4 sequences and 4 document"),
        (18 + 8, "<Q", 3, "102 bytes do not match 3 sequences and 3 document"),
        (34, "<i", -1, r"bin:1: -1 tokens at byte 0 are not in the file"),
        (34 + 8, "<i", 5, r"bin:3: 5 tokens at byte 6 are not in the file"),
        (34 + 12 + 8, "<q", 3, r"bin:1: 1 tokens at byte 3 are not in the file"),
        (34 + 36, "<q", 1, "its documents are the sequences 1 to 3 of 3"),
        (34 + 36 + 24, "<q", 2, "its documents are the sequences 0 to 2 of 3"),
        (34 + 36 + 8, "<q", 3, "document 1 ends before it begins"),
    ],
)
def test_a_megatron_index_that_does_not_fit_is_refused(tmp_path, at, kind, value, message, refuse):
    write_dataset(tmp_path / "in", [[1, 2], [3], [4, 5]], [0, 2, 2, 3], 8)
    path = tmp_path / "in" / "x_text.document.idx"
    content = bytearray(path.read_bytes())
    struct.pack_into(kind, content, at, value)
    path.write_bytes(content)
    refuse(message, tmp_path / "in", format="megatron")
