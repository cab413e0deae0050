"""Litespark's .ds and LITPKDS chunks, read with struct and numpy as their trainers do, and cut into documents again."""

import json
import struct
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from lt_data import DataError, Tokenizer, TokenStore
from lt_data.exports import blocks
from lt_data.exports.blocks import BoundaryRule, TokenBlock, split_documents
from lt_data.exports.export import export
from lt_data.exports.import_tokens import ImportOptions, import_tokens
from lt_data.exports.options import ExportOptions


def read_packed(folder: Path, block: int) -> list[list[int]]:
    """The steps of lit-gpt's PackedDatasetIterator without shuffling: the header of the first file counts for all."""
    types = {4: np.int32, 8: np.uint16}
    paths = sorted(folder.glob("*.bin"))
    first = paths[0].read_bytes()
    assert first[:7] == b"LITPKDS"
    assert struct.unpack("<Q", first[7:15]) == (1,)
    (code,) = struct.unpack("<B", first[15:16])
    (chunk,) = struct.unpack("<Q", first[16:24])
    found: list[list[int]] = []
    for path in paths:
        content = path.read_bytes()
        assert content[:24] == first[:24]
        assert len(content) == 24 + chunk * np.dtype(types[code]).itemsize
        for i in range(chunk // block):
            offset = 24 + np.dtype(types[code]).itemsize * i * block
            found.append(np.frombuffer(content, types[code], block, offset).tolist())
    assert chunk % block == 0
    return found


@pytest.mark.parametrize(("name", "token_bytes"), [("store", 2), ("wide_store", 4)])
def test_litespark(name: str, token_bytes: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    store: TokenStore = request.getfixturevalue(name)
    options = ExportOptions(to="litespark", seq_len=64, pad_id=3, file_bytes=4000, split="validation")
    report = export(store, out=tmp_path / "out", options=options)
    tokens = store.tokens(0, store.n_tokens)
    padding = -store.n_tokens % 65
    files = sorted((tmp_path / "out" / "validation").iterdir())
    assert [file.name for file in files] == [f"tokens_shard_{i:06d}.ds" for i in range(len(files))]
    assert len(files) > 2
    read = [np.fromfile(file, f"<u{token_bytes}") for file in files]
    assert all(part.size % 65 == 0 for part in read)  # no row in two files
    np.testing.assert_array_equal(np.concatenate(read), [*tokens, *[3] * padding])
    assert padding > 0
    metadata = json.loads((tmp_path / "out" / "metadata.json").read_text())
    assert metadata["subset_stats"]["validation"]["files"] == len(files)
    assert metadata["subset_stats"]["validation"]["total_size_bytes"] == sum(file.stat().st_size for file in files)
    stated = ("sequence_length", "token_size_bytes", "total_sequences", "total_tokens", "vocab_size", "add_bos")
    rows = (store.n_tokens + padding) // 65
    assert [metadata[key] for key in stated] == [64, token_bytes, rows, rows * 65, store.vocab_size, True]
    assert (report.samples, report.tokens, report.padding) == (rows, store.n_tokens, padding)


@pytest.mark.parametrize("name", ["store", "wide_store"])
def test_litpkds(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    store: TokenStore = request.getfixturevalue(name)
    options = ExportOptions(to="litpkds", seq_len=32, pad_id=5, file_bytes=1000)
    report = export(store, out=tmp_path / "out", options=options)
    rows = read_packed(tmp_path / "out", 33)
    names = sorted(path.name for path in (tmp_path / "out").glob("*.bin"))
    assert names == [f"train_{i:010d}.bin" for i in range(len(names))]
    assert len(names) > 3
    padding = len(rows) * 33 - store.n_tokens
    assert 0 <= padding < 33 * len(names)
    assert [*chain(*rows)] == store.tokens(0, store.n_tokens).tolist() + [5] * padding
    assert (report.samples, report.tokens, report.padding) == (len(rows), store.n_tokens, padding)


@pytest.mark.parametrize("to", ["litespark", "litpkds"])
@pytest.mark.parametrize("file_bytes", [None, 700])
def test_the_last_row_is_dropped_on_request(
    store: TokenStore, tmp_path: Path, to: str, file_bytes: int | None, tokenizer: Tokenizer
) -> None:
    options = ExportOptions(to=to, seq_len=99, last_row="drop", file_bytes=file_bytes)
    report = export(store, out=tmp_path / "out", options=options)
    import_tokens(
        tmp_path / "out",
        options=ImportOptions(format=to, boundaries="files"),
        tokenizer=tokenizer,
        out=tmp_path / "back",
    )
    back = TokenStore.open(tmp_path / "back")
    np.testing.assert_array_equal(back.tokens(0, back.n_tokens), store.tokens(0, report.tokens))
    assert report.tokens % 100 == 0
    assert report.tokens + report.dropped_tokens == store.n_tokens
    n_files = len([*(tmp_path / "out").rglob("*.ds"), *(tmp_path / "out").rglob("*.bin")])
    assert report.dropped_tokens < 100 * (n_files if to == "litpkds" else 1)
    assert report.padding == 0


@pytest.mark.parametrize("part", [3, 5, 1000])
@pytest.mark.parametrize(
    ("cut", "expected"),
    [
        (BoundaryRule(kind="bos", marker_id=1), [[7], [1, 8, 2], [1], [1, 9, 2, 6], [4], [1, 3]]),
        (BoundaryRule(kind="eos", marker_id=2), [[7, 1, 8, 2], [1, 1, 9, 2], [6], [4, 1, 3]]),
        (BoundaryRule(kind="rows", row_tokens=4), [[7, 1, 8, 2], [1, 1, 9, 2], [6], [4, 1, 3]]),
        (BoundaryRule(kind="files"), [[7, 1, 8], [2, 1, 1, 9, 2, 6], [4, 1, 3]]),
    ],
)
def test_where_documents_begin(
    part: int, cut: BoundaryRule, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two files of one series, an empty one and one of another series."""
    monkeypatch.setattr(blocks, "_CHUNK_IDS", part)
    names = "aaab"
    ids = [[7, 1, 8], [2, 1, 1, 9, 2, 6], [], [4, 1, 3]]
    if cut.kind == "rows":  # no row lies in two files
        ids = [[7, 1, 8, 2], [1, 1, 9, 2, 6], [], [4, 1, 3]]
    chunks = [TokenBlock(np.array(values, int), f"file {i}", names[i]) for i, values in enumerate(ids)]
    found = list(split_documents(chunks, cut))
    assert [values.tolist() for values, _ in found] == expected
    assert found[0][1] == "file 0 from id 0"
    assert found[-1][1] == ("file 3 from id 1" if cut.kind == "bos" else "file 3 from id 0")


def foreign_litespark(folder: Path, files: dict[str, list[int]], metadata: dict[str, object] | None) -> Path:
    (folder / "train").mkdir(parents=True)
    for name, ids in files.items():
        (folder / "train" / name).write_bytes(np.array(ids, "<u2").tobytes())
    if metadata is not None:
        (folder / "metadata.json").write_text(json.dumps(metadata))
    return folder


def test_litespark_of_others(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """BOS 0 and EOS 1: each file for itself, with its remainder, as its documents were cut off at its end."""
    files = {
        "tokens_shard_000001.ds": [0, 8, 1, 0, 9, 9],
        "tokens_shard_000000_remainder.ds": [0, 7, 7],
        "tokens_shard_000000.ds": [0, 5, 6, 1, 0, 5, 1, 1, 1],
    }
    folder = foreign_litespark(tmp_path / "in", files, {"token_size_bytes": 2, "sequence_length": 2})

    def imported(name: str, **options: object) -> list[list[int]]:
        import_tokens(
            folder, options=ImportOptions(format="litespark", **options), tokenizer=tokenizer, out=tmp_path / name
        )
        store = TokenStore.open(tmp_path / name)
        return [store.document(i).tolist() for i in range(store.n_documents)]

    assert imported("bos", boundaries="bos") == [[0, 5, 6, 1], [0, 5, 1, 1, 1], [0, 7, 7], [0, 8, 1], [0, 9, 9]]
    assert imported("eos", boundaries="eos", pad_id=1) == [[0, 5, 6, 1], [0, 5, 1], [0, 7, 7], [0, 8, 1], [0, 9, 9]]
    rows = [[0, 5, 6], [1, 0, 5], [1, 1, 1], [0, 7, 7], [0, 8, 1], [0, 9, 9]]
    assert imported("rows", boundaries="rows") == rows
    assert imported("files", boundaries="files", pad_id=9) == [[0, 5, 6, 1, 0, 5, 1, 1, 1], [0, 7, 7], [0, 8, 1, 0]]
    with pytest.raises(DataError, match="9 ids, not a multiple of the row length 5"):
        imported("rows5", boundaries="rows", seq_len=4)
    with pytest.raises(DataError, match="token_bytes = 3: give 2 or 4"):
        imported("three", boundaries="bos", token_bytes=3)
    with pytest.raises(DataError, match=r"000000\.ds: 18 bytes, not a multiple of 4-byte"):
        imported("four", boundaries="bos", token_bytes=4)


def test_litespark_without_a_word_on_its_tokens(tmp_path: Path, tokenizer: Tokenizer) -> None:
    folder = foreign_litespark(tmp_path / "in", {"tokens_shard_000000.ds": [5, 6]}, None)

    def refused(message: str, **options: object) -> None:
        with pytest.raises(DataError, match=message):
            import_tokens(
                folder, options=ImportOptions(format="litespark", **options), tokenizer=tokenizer, out=tmp_path / "st"
            )

    refused(r"no metadata\.json with the size of a token", boundaries="eos")
    refused("boundaries = 'rows': unknown row length", boundaries="rows", token_bytes=2)
    (folder / "metadata.json").write_text("{")
    refused(r"metadata\.json: not JSON", boundaries="eos")
    (folder / "test").mkdir()
    (folder / "test" / "tokens_shard_000000.ds").write_bytes(b"\0\0")
    refused("holds the splits train, test; give one", boundaries="eos", token_bytes=2)
    folder = tmp_path / "nothing"
    folder.mkdir()
    refused(r"no \.ds file", boundaries="eos", token_bytes=2)


def foreign_litpkds(folder: Path, name: str, chunks: list[list[int]], code: int = 8) -> None:
    folder.mkdir(exist_ok=True)
    for number, ids in enumerate(chunks):
        header = b"LITPKDS" + struct.pack("<QBQ", 1, code, len(ids))
        content = np.array(ids, {8: "<u2", 4: "<i4", 5: "<i8"}[code]).tobytes()
        (folder / f"{name}_{number:010d}.bin").write_bytes(header + content)


@pytest.mark.parametrize("code", [4, 5, 8])
def test_litpkds_of_others(tmp_path: Path, tokenizer: Tokenizer, code: int) -> None:
    """Two processes wrote two series of chunks, each padded at its end with EOS (1)."""
    foreign_litpkds(tmp_path / "in", "train_slim_0", [[0, 5, 6, 7], [1, 0, 8, 1], [0, 9, 1, 1]], code)
    foreign_litpkds(tmp_path / "in", "train_slim_1", [[0, 3, 4, 4]], code)
    options = ImportOptions(format="litpkds", boundaries="eos", pad_id=1)
    done = import_tokens(tmp_path / "in", options=options, tokenizer=tokenizer, out=tmp_path / "st")
    store = TokenStore.open(tmp_path / "st")
    expected = [[0, 5, 6, 7, 1], [0, 8, 1], [0, 9, 1], [0, 3, 4, 4]]
    assert [store.document(i).tolist() for i in range(store.n_documents)] == expected
    assert done.padding == 1


def test_chunks_that_do_not_fit_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    def refused(message: str) -> None:
        with pytest.raises(DataError, match=message):
            import_tokens(
                tmp_path / "in",
                options=ImportOptions(format="litpkds", boundaries="eos"),
                tokenizer=tokenizer,
                out=tmp_path / "st",
            )
        assert not (tmp_path / "st").exists()

    (tmp_path / "in").mkdir()
    refused(r"no \.bin file")
    foreign_litpkds(tmp_path / "in", "x", [[1, 2, 3]])
    file = tmp_path / "in" / "x_0000000000.bin"
    whole = file.read_bytes()
    file.write_bytes(whole[:-2])
    refused("28 bytes, its header says 3 ids of uint16")
    file.write_bytes(b"LITPKDT" + whole[7:])
    refused("not a LITPKDS chunk")
    file.write_bytes(whole[:10])
    refused("not a LITPKDS chunk")
    file.write_bytes(whole[:7] + struct.pack("<Q", 2) + whole[15:])
    refused("version 2, type 8")
    file.write_bytes(whole[:15] + b"\x06" + whole[16:])
    refused("version 1, type 6")
