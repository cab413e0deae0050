"""One IndexedDataset of a store, read as Megatron's own reader reads it; datasets of others as stores."""

import struct
from pathlib import Path

import numpy as np
import pytest

from lt_data import DataError, Tokenizer, TokenStore
from lt_data.exports.export import export
from lt_data.exports.import_tokens import ImportOptions, import_tokens
from lt_data.exports.options import ExportOptions
from lt_data.store import megatron as index_format
from lt_data.store.megatron import encode_index

TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def read_dataset(prefix: Path) -> list[list[int]]:
    """The steps of Megatron-LM's `_IndexReader` and `IndexedDataset.__getitem__`."""
    index = prefix.with_name(prefix.name + ".idx").read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00"
    version, code, n, n_boundaries = struct.unpack_from("<QBQQ", index, 9)
    assert version == 1
    lengths = np.frombuffer(index, "<i4", n, 34)
    pointers = np.frombuffer(index, "<i8", n, 34 + 4 * n)
    boundaries = np.frombuffer(index, "<i8", n_boundaries, 34 + 12 * n)
    assert boundaries.tolist() == list(range(n + 1))
    assert len(index) == 34 + 12 * n + 8 * n_boundaries
    tokens = prefix.with_name(prefix.name + ".bin").read_bytes()
    return [
        np.frombuffer(tokens, TYPES[code], int(length), int(pointer)).tolist()
        for length, pointer in zip(lengths, pointers, strict=True)
    ]


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
    (folder / "x_text_document.bin").write_bytes(content)
    (folder / "x_text_document.idx").write_bytes(index)


@pytest.mark.parametrize(("name", "code"), [("store", 8), ("wide_store", 4)])
def test_a_store_of_many_shards_is_one_dataset(
    name: str, code: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    store: TokenStore = request.getfixturevalue(name)
    assert len(store.manifest.shards) > 3
    report = export(store, out=tmp_path / "out", options=ExportOptions(to="megatron"))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["lt-export.json", "tokens.bin", "tokens.idx"]
    found = read_dataset(tmp_path / "out" / "tokens")
    assert found == [store[i].tolist() for i in range(store.n_documents)]
    assert (tmp_path / "out" / "tokens.idx").read_bytes()[17] == code
    assert (report.samples, report.tokens) == (store.n_documents, store.n_tokens)


def test_an_index_in_parts_is_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.arange(1, 12)
    whole = encode_index(lengths, "uint16")
    for part in (1, 2, 4, 11, 12):
        monkeypatch.setattr(index_format, "_CHUNK_DOCUMENTS", part)
        assert encode_index(lengths, "uint16") == whole


@pytest.mark.parametrize("code", [4, 5, 8])
@pytest.mark.parametrize("named", ["", "x_text_document", "x_text_document.idx", "x_text_document.bin"])
def test_a_dataset_of_others_is_imported(tmp_path: Path, wide_tokenizer: Tokenizer, code: int, named: str) -> None:
    """Documents of several sequences and of none, a sequence of none, sequences that do not touch."""
    high = 65_000 if code == 8 else 69_000
    write_dataset(tmp_path / "in", [[1, high], [3], [], [4, 5], [6]], [0, 2, 2, 4, 5], code, gap=8)
    done = import_tokens(
        tmp_path / "in" / named, options=ImportOptions(format="megatron"), tokenizer=wide_tokenizer, out=tmp_path / "st"
    )
    store = TokenStore(tmp_path / "st")
    assert [store[i].tolist() for i in range(store.n_documents)] == [[1, high, 3], [4, 5], [6]]
    assert done.manifest.empty_documents == 1


def changed(path: Path, at: int, kind: str, value: int) -> None:
    content = bytearray(path.read_bytes())
    struct.pack_into(kind, content, at, value)
    path.write_bytes(content)


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
def test_an_index_that_does_not_fit_is_refused(
    tmp_path: Path, tokenizer: Tokenizer, at: int, kind: str, value: int, message: str
) -> None:
    write_dataset(tmp_path / "in", [[1, 2], [3], [4, 5]], [0, 2, 2, 3], 8)
    changed(tmp_path / "in" / "x_text_document.idx", at, kind, value)
    with pytest.raises(DataError, match=message):
        import_tokens(
            tmp_path / "in", options=ImportOptions(format="megatron"), tokenizer=tokenizer, out=tmp_path / "st"
        )
    assert not (tmp_path / "st").exists()


def test_a_folder_of_two_pairs_and_odd_bytes(tmp_path: Path, tokenizer: Tokenizer) -> None:
    options = ImportOptions(format="megatron")
    write_dataset(tmp_path / "in", [[1, 2]], [0, 1], 8)
    (tmp_path / "in" / "y.idx").touch()
    with pytest.raises(DataError, match=r"one \.idx file is needed, found x_text_document\.idx, y\.idx"):
        import_tokens(tmp_path / "in", options=options, tokenizer=tokenizer, out=tmp_path / "st")
    with (tmp_path / "in" / "x_text_document.bin").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(DataError, match="not a whole number of tokens"):
        import_tokens(tmp_path / "in" / "x_text_document", options=options, tokenizer=tokenizer, out=tmp_path / "st")
