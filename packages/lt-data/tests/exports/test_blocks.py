"""Litespark's .ds, read with numpy as its trainer does, and cut into documents again."""

import json
from pathlib import Path

import numpy as np
import pytest

from lt_data import DataError, Tokenizer, TokenStore
from lt_data.exports import blocks
from lt_data.exports.blocks import BoundaryRule, split_documents
from lt_data.exports.export import export
from lt_data.exports.import_tokens import ImportOptions, import_tokens
from lt_data.exports.options import ExportOptions


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


@pytest.mark.parametrize("file_bytes", [None, 700])
def test_the_last_row_is_dropped_on_request(
    store: TokenStore, tmp_path: Path, file_bytes: int | None, tokenizer: Tokenizer
) -> None:
    options = ExportOptions(to="litespark", seq_len=99, last_row="drop", file_bytes=file_bytes)
    report = export(store, out=tmp_path / "out", options=options)
    import_tokens(
        tmp_path / "out",
        options=ImportOptions(format="litespark", boundaries="files"),
        tokenizer=tokenizer,
        out=tmp_path / "back",
    )
    back = TokenStore(tmp_path / "back")
    np.testing.assert_array_equal(back.tokens(0, back.n_tokens), store.tokens(0, report.tokens))
    assert report.tokens % 100 == 0
    assert report.tokens + report.dropped_tokens == store.n_tokens
    assert report.dropped_tokens < 100
    assert report.padding == 0


@pytest.mark.parametrize("part", [3, 5, 1000])
@pytest.mark.parametrize(
    ("cut", "expected"),
    [
        (BoundaryRule(kind="bos", marker_id=1), [[7], [1, 8, 2], [1], [1, 9, 2, 6, 4], [1, 3]]),
        (BoundaryRule(kind="eos", marker_id=2), [[7, 1, 8, 2], [1, 1, 9, 2], [6, 4, 1, 3]]),
        (BoundaryRule(kind="rows", row_tokens=4), [[7, 1, 8, 2], [1, 1, 9, 2], [6, 4, 1, 3]]),
        (BoundaryRule(kind="files"), [[7, 1, 8], [2, 1, 1, 9, 2, 6], [4, 1, 3]]),
    ],
)
def test_where_documents_begin(
    part: int, cut: BoundaryRule, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents go on across files, one of which is empty."""
    monkeypatch.setattr(blocks, "_CHUNK_IDS", part)
    ids = [[7, 1, 8], [2, 1, 1, 9, 2, 6], [], [4, 1, 3]]
    if cut.kind == "rows":  # no row lies in two files
        ids = [[7, 1, 8, 2], [1, 1, 9, 2, 6], [], [4, 1, 3]]
    chunks = [(np.array(values, int), f"file {i}") for i, values in enumerate(ids)]
    found = list(split_documents(chunks, cut, continued=True))
    assert [values.tolist() for values, _ in found] == expected
    assert found[0][1] == "file 0 from id 0"
    last = {"bos": "file 3 from id 1", "files": "file 3 from id 0"}
    assert found[-1][1] == last.get(cut.kind, f"file 1 from id {4 if cut.kind == 'rows' else 5}")


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
        store = TokenStore(tmp_path / name)
        return [store[i].tolist() for i in range(store.n_documents)]

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


def test_totals_of_litespark_are_compared(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Total sizes of each split, and the tokens of all of them; a split may be copied without the others."""
    stats = {"train": {"files": 2, "total_size_bytes": 12}, "test": {"files": 1, "total_size_bytes": 6}}
    metadata = {"token_size_bytes": 2, "sequence_length": 2, "total_tokens": 9, "subset_stats": stats}
    files = {"tokens_shard_000000.ds": [5, 6, 7], "tokens_shard_000001.ds": [8, 9, 10]}
    folder = foreign_litespark(tmp_path / "in", files, metadata)
    options = ImportOptions(format="litespark", boundaries="rows")

    def load(path: Path, **changes: object) -> int:
        (folder / "metadata.json").write_text(json.dumps(metadata | changes))
        done = import_tokens(path, options=options, tokenizer=tokenizer, out=tmp_path / "st", overwrite=True)
        return done.manifest.tokens

    for path in (folder, folder / "train"):
        assert load(path) == load(path, total_tokens=6, subset_stats={}) == 6
        for changes, message in (
            ({"total_tokens": 12}, "total_tokens is 12, but there are 9; copy or prepare the files again"),
            ({"total_tokens": 9, "subset_stats": {}}, "total_tokens is 9, but there are 6"),
            ({"subset_stats": [3]}, "not the description of Litespark's data"),
            ({"subset_stats": {"train": 3}}, "not the description of Litespark's data"),
        ):
            with pytest.raises(DataError, match=rf"metadata\.json: {message}"):
                load(path, **changes)
    (folder / "train" / "tokens_shard_000001.ds").write_bytes(b"")
    with pytest.raises(DataError, match=r"metadata\.json: total_size_bytes of train is 12, but there are 6"):
        load(folder)


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
