"""JSON lines of ids, read with json and gzip in the steps of the recipe's GPTPretrainingDataset."""

import gzip
import json
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from lt_data import DataError, Tokenizer, TokenStore
from lt_data.exports import smp
from lt_data.exports.export import export
from lt_data.exports.import_tokens import ImportOptions, import_tokens
from lt_data.exports.options import ExportOptions


def lines(folder: Path, suffix: str) -> list[dict[str, list[int]]]:
    """Every file of the suffix, sorted; each line an object of two lists."""
    found: list[dict[str, list[int]]] = []
    for path in sorted(file for file in folder.iterdir() if file.name.endswith(suffix)):
        with gzip.open(path, "rt") if suffix.endswith(".gz") else path.open() as file:
            found += [json.loads(line) for line in file]
    assert all([*record] == ["input_ids", "attention_mask"] for record in found)
    return found


@pytest.mark.parametrize("gz", [True, False])
def test_documents(store: TokenStore, tmp_path: Path, gz: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smp, "_CHUNK_IDS", 100)  # long lines are written in parts
    report = export(store, out=tmp_path / "out", options=ExportOptions(to="smp", gz=gz, file_bytes=9000))
    suffix = ".json.gz" if gz else ".json"
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == [f"part-{i:05d}{suffix}" for i in range(len(names))]
    assert len(names) > 3
    found = lines(tmp_path / "out", suffix)
    assert [record["input_ids"] for record in found] == [store[i].tolist() for i in range(store.n_documents)]
    assert all(record["attention_mask"] == [1] * len(record["input_ids"]) for record in found)
    assert (report.samples, report.tokens, report.padding) == (store.n_documents, store.n_tokens, 0)
    if not gz:
        assert all((tmp_path / "out" / name).stat().st_size < 9000 + 6 * int(store.lengths.max()) for name in names)


def test_rows_are_padded_or_dropped(wide_store: TokenStore, tmp_path: Path) -> None:
    store = wide_store
    tokens = store.tokens(0, store.n_tokens).tolist()
    n, rest = divmod(store.n_tokens, 77)
    assert rest > 0
    export(store, out=tmp_path / "pad", options=ExportOptions(to="smp", seq_len=77, file_bytes=5000))
    found = lines(tmp_path / "pad", ".json.gz")
    assert [*chain(*(record["input_ids"] for record in found))] == tokens + [69_999] * (77 - rest)  # EOS is the padding
    assert [*chain(*(record["attention_mask"] for record in found))] == [1] * len(tokens) + [0] * (77 - rest)
    assert {len(record["input_ids"]) for record in found} == {77}
    report = export(store, out=tmp_path / "drop", options=ExportOptions(to="smp", seq_len=77, last_row="drop"))
    assert lines(tmp_path / "drop", ".json.gz") == found[:-1]
    assert (report.samples, report.tokens, report.dropped_tokens, report.padding) == (n, 77 * n, rest, 0)


def test_the_bytes_are_the_same_each_time(store: TokenStore, tmp_path: Path) -> None:
    for name in ("a", "b"):
        export(store, out=tmp_path / name / "out", options=ExportOptions(to="smp"))
    first = (tmp_path / "a" / "out" / "part-00000.json.gz").read_bytes()
    assert first == (tmp_path / "b" / "out" / "part-00000.json.gz").read_bytes()
    assert first == gzip.compress(gzip.decompress(first), 6, mtime=0)[:9] + b"\xff" + first[10:], "no time, no system"
    assert first[4:8] == bytes(4)  # no time in the header


def test_lines_of_others_are_imported(tmp_path: Path, wide_tokenizer: Tokenizer) -> None:
    """Of several files in the order of their names, packed and plain, with blank lines and other fields."""
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "b.json").write_text('{"id": 1, "ids": [5, 69999]}\n\n{"ids": []}\n{"ids": [7]}')
    (folder / "a.json.gz").write_bytes(gzip.compress(b'{"ids": [1, 2, 3], "attention_mask": [0, 1, 1]}\r\n'))
    (folder / "README").write_text("no data")
    options = ImportOptions(format="smp", field="ids")
    done = import_tokens(folder, options=options, tokenizer=wide_tokenizer, out=tmp_path / "st")
    store = TokenStore(tmp_path / "st")
    assert [store[i].tolist() for i in range(store.n_documents)] == [[2, 3], [5, 69999], [7]]
    assert (done.padding, done.manifest.empty_documents) == (1, 1)
    import_tokens(folder / "b.json", options=options, tokenizer=wide_tokenizer, out=tmp_path / "one")
    assert TokenStore(tmp_path / "one").n_tokens == 3


def test_bos_and_eos_are_added_where_they_are_missing(tmp_path: Path, wide_tokenizer: Tokenizer) -> None:
    (tmp_path / "in.json").write_text('{"input_ids": [69998, 5]}\n{"input_ids": [6, 69999]}\n')
    options = ImportOptions(format="smp", bos=True, eos=True)
    done = import_tokens(tmp_path / "in.json", options=options, tokenizer=wide_tokenizer, out=tmp_path / "st")
    assert TokenStore(tmp_path / "st").tokens(0, 6).tolist() == [69998, 5, 69999, 69998, 6, 69999]
    assert (done.manifest.bos, done.manifest.eos) == (True, True)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1, 2]", r"in\.json:2: no field 'input_ids' \(found list\)"),
        ('{"text": "a"}', r"in\.json:2: no field 'input_ids' \(found fields 'text'\)"),
        ('{"input_ids": [1, 2', r"in\.json:2: not a JSON value"),
        ('{"input_ids": [1, 2.0]}', r"in\.json:2: input_ids: not a list of integers"),
        ('{"input_ids": [1, true]}', r"in\.json:2: input_ids: not a list of integers"),
        ('{"input_ids": "12"}', r"in\.json:2: input_ids: not a list of integers"),
        ('{"input_ids": [99999999999999999999]}', r"in\.json:2: input_ids: an id beyond 64 bits"),
        ('{"input_ids": [1, 70000]}', r"in\.json:2: .*70000"),
        ('{"input_ids": [-1]}', r"in\.json:2: .*-1"),
        ('{"input_ids": [1], "attention_mask": [1, 1]}', r"in\.json:2: 1 ids and 2 mask values"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, wide_tokenizer: Tokenizer, line: str, message: str) -> None:
    (tmp_path / "in.json").write_text('{"input_ids": [1]}\n' + line + "\n")
    with pytest.raises(DataError, match=message):
        import_tokens(
            tmp_path / "in.json", options=ImportOptions(format="smp"), tokenizer=wide_tokenizer, out=tmp_path / "st"
        )
    assert not (tmp_path / "st").exists()


def test_a_cut_or_damaged_gz_is_refused(store: TokenStore, tmp_path: Path, tokenizer: Tokenizer) -> None:
    export(store, out=tmp_path / "out", options=ExportOptions(to="smp"))
    file = tmp_path / "out" / "part-00000.json.gz"
    whole = file.read_bytes()
    middle = len(whole) // 2
    damaged = whole[:middle] + bytes(byte ^ 0xFF for byte in whole[middle : middle + 40]) + whole[middle + 40 :]
    for content in (whole[:-200], whole[:-4], damaged, b"plain text"):
        file.write_bytes(content)
        with pytest.raises(DataError, match=r"part-00000\.json\.gz"):
            import_tokens(
                tmp_path / "out", options=ImportOptions(format="smp"), tokenizer=tokenizer, out=tmp_path / "back"
            )
        assert not (tmp_path / "back").exists()


def test_the_recipe_reads_rows(store: TokenStore, tmp_path: Path) -> None:
    """Its dataset in its own steps: all lines of a file in memory, `__getitem__`, no crop as no row is longer."""
    export(store, out=tmp_path / "out", options=ExportOptions(to="smp", seq_len=64))
    with gzip.open(tmp_path / "out" / "part-00000.json.gz", "rt") as file:
        input_data = [line for _, line in enumerate(file, 1)]
    tokens = store.tokens(0, store.n_tokens)
    for index in range(len(input_data) - 1):
        record = json.loads(input_data[index])
        assert len(record["input_ids"]) <= 64
        np.testing.assert_array_equal(record["input_ids"], tokens[64 * index : 64 * index + 64])
