"""What all formats share: options, atomic and synced folders, totals; and what the readers of each format find."""

import gzip
import json
from itertools import chain
from typing import Any

import datasets
import numpy as np
import pytest

from lt_data import DataError, Document, RowReader, SourceOptions, Tokenizer, TokenStore, pack, prepare
from lt_data.exports import smp
from lt_data.exports.export import export
from lt_data.exports.options import ExportOptions


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
        ({"to": "smp", "seq_len": 4, "packing": "bfd", "last_row": "drop"}, "last_row = drop: any row of packing"),
        ({"to": "smp", "seq_len": 4, "labels": "copy"}, "labels = copy: smp has no labels"),
        ({"to": "hf", "seq_len": 4, "labels": "copy"}, "would train on padding"),
        ({"to": "hf", "split": "dev"}, "split = 'dev': one of train, validation, test"),
        ({"to": "hf", "file_bytes": 0}, "file_bytes = 0: at least 1"),
    ],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises(DataError, match=message):
        ExportOptions(**options)


def test_padding(store, texts, tmp_path):
    options = {"to": "litespark", "seq_len": 8}
    with pytest.raises(DataError, match=r"pad_id = 300: the ids of this store are 0 to 299"):
        export(store, out=tmp_path / "out", options=ExportOptions(**options, pad_id=300))
    with pytest.raises(DataError, match=r"last_row = 'drop': \d+ tokens do not fill one row"):
        export(store, out=tmp_path / "out", options=ExportOptions(to="hf", seq_len=10**6, last_row="drop"))
    assert not (tmp_path / "out").exists()
    bare = Tokenizer.train(texts, vocab_size=300, special_tokens=())  # names no id for padding, nor EOS
    documents = [Document(text=text, source="text") for text in texts[:3]]
    prepare(documents, tokenizer=bare, out=tmp_path / "bare", bos=False, eos=False)
    bare_store = TokenStore(tmp_path / "bare")
    n = bare_store.n_tokens
    (tmp_path / "out").mkdir()  # an empty folder is taken
    export(bare_store, out=tmp_path / "out", options=ExportOptions(to="litespark", seq_len=n + 9))
    found = np.fromfile(tmp_path / "out" / "train" / "tokens_shard_000000.ds", "<u2")
    np.testing.assert_array_equal(found, [*bare_store.tokens(0, n), *[0] * 10])


# datasets


@pytest.fixture
def loaded(tmp_path, monkeypatch) -> Any:
    """Exports a store and loads it with `datasets`; gives back the report too."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()

    def load(store: TokenStore, **options: Any) -> tuple[Any, Any]:
        folder = tmp_path / f"hf{len([*tmp_path.iterdir()])}"
        report = export(store, out=folder, options=ExportOptions(to="hf", **options))
        return report, datasets.load_from_disk(str(folder))

    return load


@pytest.mark.parametrize("name", ["store", "wide_store"])
def test_hf_documents(name, loaded, tmp_path, request):
    store: TokenStore = request.getfixturevalue(name)
    report, found = loaded(store, file_bytes=3000, split="test")
    assert found.column_names == ["input_ids"]
    assert len(found.cache_files) > 3
    assert found["input_ids"][:] == [store[i].tolist() for i in range(store.n_documents)]
    assert found.split == "test"
    totals = (report.samples, report.tokens, report.padding, report.dropped_tokens)
    assert totals == (store.n_documents, store.n_tokens, 0, 0)


@pytest.mark.parametrize("seq_len", [1, 100])
def test_hf_rows_as_the_neuron_examples_made_them(store, loaded, seq_len):
    """`group_texts` over all texts at once: consecutive runs, and labels that repeat the ids."""
    report, found = loaded(store, seq_len=seq_len, last_row="drop", labels="copy", file_bytes=20_000)
    n_rows, rest = divmod(store.n_tokens, seq_len)
    assert bool(rest) == (seq_len > 1)
    assert found["input_ids"][:] == found["labels"][:] == store.tokens(0, n_rows * seq_len).reshape(n_rows, -1).tolist()
    assert set(np.ravel(found["attention_mask"][:])) == {1}
    assert (report.samples, report.tokens, report.dropped_tokens) == (n_rows, n_rows * seq_len, rest)
    assert report.dropped_labels == n_rows - (not rest)  # the last token of each row has a label in the store


@pytest.mark.parametrize("mode", ["concat", "bfd"])
@pytest.mark.parametrize("seq_len", [17, 300])
def test_hf_rows_of_a_reader_that_shifts_predict_what_the_store_does(store, loaded, mode, seq_len):
    """Padding is one more document, so that its positions count from 0 again."""
    report, found = loaded(store, seq_len=seq_len, packing=mode, pad_id=7)
    reader = RowReader(store, pack(store, seq_len=seq_len, mode=mode))
    rows = reader.read_rows(np.arange(reader.n_rows))
    columns = {name: np.array(values) for name, values in found.with_format("numpy")[:].items()}
    filled = rows.doc_ids >= 0
    np.testing.assert_array_equal(columns["attention_mask"], filled)
    np.testing.assert_array_equal(columns["input_ids"], np.where(filled, rows.input_ids, 7))
    np.testing.assert_array_equal(columns["labels"][:, 1:], rows.labels[:, :-1])
    assert report.dropped_labels == np.count_nonzero(rows.labels[:, -1] != -100)
    assert (report.tokens, report.padding) == (store.n_tokens, np.count_nonzero(~filled))
    assert report.padding > 0
    assert ("position_ids" in columns) == (mode == "bfd")
    if mode == "bfd":
        np.testing.assert_array_equal(columns["position_ids"][filled], rows.position_ids[filled])
        np.testing.assert_array_equal(columns["position_ids"][~filled], (np.cumsum(~filled, axis=1) - 1)[~filled])


# JSON lines, in the steps of the recipe's GPTPretrainingDataset


@pytest.mark.parametrize("gz", [True, False])
@pytest.mark.parametrize("seq_len", [None, 77])
def test_smp(wide_store, tmp_path, gz, seq_len, monkeypatch):
    monkeypatch.setattr(smp, "_CHUNK_IDS", 100)  # long lines are written in parts
    store = wide_store
    options = ExportOptions(to="smp", gz=gz, seq_len=seq_len, file_bytes=5000)
    report = export(store, out=tmp_path / "out", options=options)
    paths = sorted((tmp_path / "out").iterdir())
    assert [path.name for path in paths] == [f"part-{i:05d}.json{'.gz' * gz}" for i in range(len(paths))]
    assert len(paths) > 3
    texts = [gzip.decompress(path.read_bytes()) if gz else path.read_bytes() for path in paths]
    assert all(len(text) < 2 * 5000 + 9 * 300 for text in texts)
    if gz:
        assert paths[0].read_bytes()[4:8] == bytes(4), "no time in the header"
    records = [json.loads(line) for text in texts for line in text.splitlines()]
    ids = [record["input_ids"] for record in records]
    mask = [record["attention_mask"] for record in records]
    if seq_len is None:
        assert ids == [store[i].tolist() for i in range(store.n_documents)]
        assert mask == [[1] * len(values) for values in ids]
    else:
        padding = -store.n_tokens % 77
        assert [*chain(*ids)] == [*store.tokens(0, store.n_tokens).tolist(), *[69_999] * padding]  # EOS is the padding
        assert [*chain(*mask)] == [1] * store.n_tokens + [0] * padding
        assert {len(values) for values in ids} == {77}
        assert (report.samples, report.padding) == (len(records), padding)
        dropped = export(
            store, out=tmp_path / "drop", options=ExportOptions(to="smp", seq_len=77, last_row="drop", gz=False)
        )
        assert len((tmp_path / "drop" / "part-00000.json").read_bytes().splitlines()) == len(records) - 1
        assert (dropped.tokens, dropped.dropped_tokens) == (77 * (len(records) - 1), 77 - padding)


@pytest.mark.parametrize("shape", [{"to": "hf"}, {"to": "smp"}, {"to": "smp", "seq_len": 50, "gz": False}], ids=str)
def test_prepare_reads_what_was_exported(shape, wide_store, wide_tokenizer, tmp_path):
    export(wide_store, out=tmp_path / "out", options=ExportOptions(**shape, file_bytes=5000))
    options = SourceOptions(tokens_field="input_ids")
    prepare([tmp_path / "out"], options=options, tokenizer=wide_tokenizer, out=tmp_path / "back", bos=False, eos=False)
    back = TokenStore(tmp_path / "back")
    np.testing.assert_array_equal(back.tokens(0, back.n_tokens), wide_store.tokens(0, wide_store.n_tokens))
    if "seq_len" not in shape:
        np.testing.assert_array_equal(back.lengths, wide_store.lengths)
