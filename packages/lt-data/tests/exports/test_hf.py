"""Folders of `datasets`: read by the real `load_from_disk` and by the loader of AWS Neuron's examples."""

import json
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler
from transformers import default_data_collator

from lt_data import DataError, RowReader, Tokenizer, TokenStore, pack
from lt_data.exports.export import export
from lt_data.exports.import_tokens import ImportOptions, import_tokens
from lt_data.exports.options import ExportOptions


@pytest.fixture(autouse=True)
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def loaded(path: Path) -> datasets.Dataset:
    found = datasets.load_from_disk(str(path))
    assert isinstance(found, datasets.Dataset)
    return found


@pytest.mark.parametrize("name", ["store", "wide_store"])
def test_documents_are_those_of_the_store(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    store: TokenStore = request.getfixturevalue(name)
    report = export(store, out=tmp_path / "hf", options=ExportOptions(to="hf", file_bytes=5000))
    found = loaded(tmp_path / "hf")
    assert found.column_names == ["input_ids"]
    assert len(found.cache_files) > 3
    assert len(found) == store.n_documents == report.samples
    assert found["input_ids"][:] == [store[i].tolist() for i in range(store.n_documents)]
    assert found.data.schema.field("input_ids").type == pyarrow.list_(pyarrow.int32())
    assert found.split == "train"
    assert (report.tokens, report.padding, report.dropped_tokens) == (store.n_tokens, 0, 0)


def test_concat_rows_as_the_neuron_examples_made_them(store: TokenStore, tmp_path: Path) -> None:
    """`group_texts` over all texts at once: consecutive runs, and labels that repeat the ids."""
    options = ExportOptions(to="hf", seq_len=100, last_row="drop", labels="copy", file_bytes=20_000)
    report = export(store, out=tmp_path / "hf", options=options)
    found = loaded(tmp_path / "hf")
    tokens = store.tokens(0, store.n_tokens)
    n_rows, rest = divmod(store.n_tokens, 100)
    assert rest > 0
    assert found["input_ids"][:] == tokens[: n_rows * 100].reshape(-1, 100).tolist()
    assert found["labels"][:] == found["input_ids"][:]
    assert set(np.ravel(found["attention_mask"][:])) == {1}
    assert (report.samples, report.tokens, report.dropped_tokens) == (n_rows, n_rows * 100, rest)
    assert report.dropped_labels == n_rows  # the last token of each row has a label in the store


def test_padding_is_masked(store: TokenStore, tmp_path: Path) -> None:
    report = export(store, out=tmp_path / "hf", options=ExportOptions(to="hf", seq_len=100, pad_id=7))
    last = loaded(tmp_path / "hf")[-1]
    n = store.n_tokens % 100
    assert last["input_ids"] == [*store.tokens(store.n_tokens - n, n).tolist(), *[7] * (100 - n)]
    assert last["attention_mask"] == [1] * n + [0] * (100 - n)
    assert last["labels"] == [*last["input_ids"][:n], *[-100] * (100 - n)]
    assert (report.tokens, report.padding) == (store.n_tokens, 100 - n)


@pytest.mark.parametrize("mode", ["concat", "bfd"])
@pytest.mark.parametrize("seq_len", [17, 300])
def test_a_reader_that_shifts_predicts_what_the_store_does(
    store: TokenStore, tmp_path: Path, mode: str, seq_len: int
) -> None:
    report = export(store, out=tmp_path / "hf", options=ExportOptions(to="hf", seq_len=seq_len, packing=mode))
    reader = RowReader(store, pack(store, seq_len=seq_len, mode=mode))
    rows = reader.read_rows(np.arange(reader.n_rows))
    found = loaded(tmp_path / "hf").with_format("numpy")
    mask = np.array(found["attention_mask"][:])
    np.testing.assert_array_equal(mask, rows.doc_ids >= 0)
    np.testing.assert_array_equal(np.array(found["input_ids"][:]) * mask, rows.input_ids)
    np.testing.assert_array_equal(np.array(found["labels"][:])[:, 1:], rows.labels[:, :-1])
    assert report.dropped_labels == np.count_nonzero(rows.labels[:, -1] != -100)


def test_rows_are_those_of_the_packing_that_is_asked_for_whichever_packs_there_are(
    store: TokenStore, tmp_path: Path
) -> None:
    options = ExportOptions(to="hf", seq_len=17)
    export(store, out=tmp_path / "before", options=options)
    for mode in ("concat", "bfd"):
        pack(store, seq_len=17, mode=mode)
        export(store, out=tmp_path / mode, options=options)
        for name in ("input_ids", "labels"):
            assert loaded(tmp_path / mode)[name][:] == loaded(tmp_path / "before")[name][:]


@pytest.mark.parametrize("seq_len", [17, 300])
def test_best_fit_rows_say_where_their_documents_begin(store: TokenStore, tmp_path: Path, seq_len: int) -> None:
    """Padding is one more document, so that the lengths of a row add up to its ids, as TRL's collator needs it."""
    options = ExportOptions(to="hf", seq_len=seq_len, packing="bfd")
    reader = RowReader(store, pack(store, seq_len=seq_len, mode="bfd"))
    rows = reader.read_rows(np.arange(reader.n_rows))
    export(store, out=tmp_path / "positions", options=options)
    export(store, out=tmp_path / "lengths", options=replace(options, document_boundaries="seq_lengths"))
    positions = np.array(loaded(tmp_path / "positions")["position_ids"][:])
    filled = rows.doc_ids >= 0
    np.testing.assert_array_equal(positions[filled], rows.position_ids[filled])
    np.testing.assert_array_equal(positions[~filled], (np.cumsum(~filled, axis=1) - 1)[~filled])
    assert filled.sum() < filled.size, "no padding in this case"
    for row, lengths in zip(positions, loaded(tmp_path / "lengths")["seq_lengths"][:], strict=True):
        np.testing.assert_array_equal(np.concatenate([np.arange(n) for n in lengths]), row)
    with pytest.raises(DataError, match="document_boundaries: applies to to = hf with packing = bfd"):
        ExportOptions(to="hf", seq_len=seq_len, document_boundaries="seq_lengths")


def test_the_flash_attention_of_transformers_finds_the_documents_of_a_row(store: TokenStore, tmp_path: Path) -> None:
    """Its own functions, through its own collator, in a batch of one row: of more rows it takes each for one text."""
    from transformers import modeling_flash_attention_utils as flash

    export(store, out=tmp_path / "hf", options=ExportOptions(to="hf", seq_len=64, packing="bfd"))
    reader = RowReader(store, pack(store, seq_len=64, mode="bfd"))
    found = [default_data_collator([row])["position_ids"] for row in loaded(tmp_path / "hf")]
    n_packed = 0
    for number, position_ids in enumerate(found):
        expected = reader.read_token_rows(np.array([number])).cu_seqlens()
        (cu_seqlens, _), _ = flash.prepare_fa_kwargs_from_position_ids(position_ids)
        assert cu_seqlens.tolist() == expected.tolist()
        is_packed = flash._is_packed_sequence(position_ids, position_ids.shape[0])
        assert bool(is_packed) == (expected.size > 2)
        n_packed += expected.size > 2
    assert n_packed > 3
    assert not flash._is_packed_sequence(torch.cat(found[:2]), 2)


def test_a_pack_in_the_store_is_used(store: TokenStore, tmp_path: Path) -> None:
    """And what was made without one is the same."""
    options = ExportOptions(to="hf", seq_len=64, packing="bfd")
    export(store, out=tmp_path / "before", options=options)
    assert not (store.path / "packs").exists()
    pack(store, seq_len=64, mode="bfd")
    export(store, out=tmp_path / "after", options=options)
    for file in sorted((tmp_path / "before").iterdir()):
        assert file.read_bytes() == (tmp_path / "after" / file.name).read_bytes()


def test_the_loader_of_the_neuron_examples(store: TokenStore, tmp_path: Path) -> None:
    """Sampler, collator and batches as their training_utils has them, two ranks."""
    export(store, out=tmp_path / "hf", options=ExportOptions(to="hf", seq_len=50))
    found = loaded(tmp_path / "hf")
    seen: dict[int, list[int]] = {}
    for rank in range(2):
        sampler = DistributedSampler(found, num_replicas=2, rank=rank, shuffle=False, drop_last=True)
        loader = DataLoader(found, collate_fn=default_data_collator, sampler=sampler, batch_size=3, drop_last=True)
        for number, batch in enumerate(loader):
            assert {name: value.dtype for name, value in batch.items()} == dict.fromkeys(
                ("input_ids", "attention_mask", "labels"), torch.int64
            )
            for i, row in enumerate(batch["input_ids"].tolist()):
                seen[(number * 3 + i) * 2 + rank] = row
    tokens = store.tokens(0, store.n_tokens).tolist()
    assert len(seen) > 20
    assert all(row == tokens[50 * i : 50 * i + 50] for i, row in seen.items() if 50 * i + 50 <= len(tokens))


def test_what_datasets_saved_is_imported(tmp_path: Path, wide_tokenizer: Tokenizer) -> None:
    """Two splits, fixed-size lists, int64 and an attention mask."""
    ids = [[5, 69_000, 7], [8], [], [9, 9, 9, 9]]
    plain = datasets.Dataset.from_dict({"text": list("abcd"), "input_ids": ids})
    plain.save_to_disk(str(tmp_path / "plain"), num_shards=2)
    options = ImportOptions(format="hf")
    done = import_tokens(tmp_path / "plain", options=options, tokenizer=wide_tokenizer, out=tmp_path / "a")
    store = TokenStore(tmp_path / "a")
    assert [store[i].tolist() for i in range(store.n_documents)] == [ids[0], ids[1], ids[3]]
    assert done.manifest.empty_documents == 1

    rows = {"ids": [[1, 2, 3], [4, 5, 6]], "attention_mask": [[1, 1, 1], [0, 1, 0]]}
    features = datasets.Features(
        {
            "ids": datasets.Sequence(datasets.Value("uint32"), 3),
            "attention_mask": datasets.Sequence(datasets.Value("bool")),
        }
    )
    split = datasets.DatasetDict({"test": datasets.Dataset.from_dict(rows, features=features)})
    split.save_to_disk(str(tmp_path / "dict"))
    with pytest.raises(DataError, match="holds the splits test"):
        import_tokens(tmp_path / "dict", options=options, tokenizer=wide_tokenizer, out=tmp_path / "b")
    options = ImportOptions(format="hf", field="ids")
    done = import_tokens(tmp_path / "dict" / "test", options=options, tokenizer=wide_tokenizer, out=tmp_path / "b")
    store = TokenStore(tmp_path / "b")
    assert [store[i].tolist() for i in range(store.n_documents)] == [[1, 2, 3], [5]]
    assert done.padding == 2


def test_the_files_are_read_in_the_order_of_the_state(tmp_path: Path, wide_tokenizer: Tokenizer) -> None:
    ids = [[i] for i in range(30)]
    datasets.Dataset.from_dict({"input_ids": ids}).save_to_disk(str(tmp_path / "saved"), num_shards=3)
    state = tmp_path / "saved" / "state.json"
    values = json.loads(state.read_text())
    state.write_text(json.dumps({**values, "_data_files": values["_data_files"][::-1]}))
    import_tokens(
        tmp_path / "saved", options=ImportOptions(format="hf"), tokenizer=wide_tokenizer, out=tmp_path / "store"
    )
    found = loaded(tmp_path / "saved")["input_ids"][:]
    assert found != ids
    store = TokenStore(tmp_path / "store")
    assert [store[i].tolist() for i in range(store.n_documents)] == found


def test_a_sliced_dataset_is_imported_whole(tmp_path: Path, wide_tokenizer: Tokenizer) -> None:
    """An indices mapping that `save_to_disk` flattens, and batches of other sizes."""
    ids = [list(range(i, i + i % 7 + 1)) for i in range(2500)]
    shuffled = datasets.Dataset.from_dict({"input_ids": ids}).shuffle(seed=3).select(range(2100))
    shuffled.save_to_disk(str(tmp_path / "saved"))
    import_tokens(
        tmp_path / "saved", options=ImportOptions(format="hf"), tokenizer=wide_tokenizer, out=tmp_path / "store"
    )
    store = TokenStore(tmp_path / "store")
    assert [store[i].tolist() for i in range(store.n_documents)] == shuffled["input_ids"][:]


@pytest.mark.parametrize(
    ("rows", "field", "message"),
    [
        ({"text": ["a"]}, None, r"data-00000-of-00001\.arrow: no column 'input_ids' \(found text\)"),
        ({"text": ["a"]}, "text", r"arrow:1: column 'text' is not a list of numbers"),
        ({"x": [["a"]]}, "x", r"arrow:1: column 'x' holds string, not integers"),
        ({"x": [[1.5]]}, "x", r"arrow:1: column 'x' holds double, not integers"),
        ({"x": [[1], [2, None]]}, "x", r"arrow:2: column 'x' is not a list of numbers"),
        ({"x": [[1], None]}, "x", r"arrow:2: column 'x' is not a list of numbers"),
        ({"x": [[1], [70_000]]}, "x", r"arrow:2: .*70000.*wide"),
        ({"x": [[1, -1]]}, "x", r"arrow:1: .*-1.*wide"),
        ({"x": [[1, 2]], "attention_mask": [[1]]}, "x", r"arrow:1: 2 ids and 1 mask values"),
    ],
)
def test_what_is_no_list_of_ids_is_refused(
    tmp_path: Path, wide_tokenizer: Tokenizer, rows: dict[str, list[object]], field: str | None, message: str
) -> None:
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "saved"))
    options = ImportOptions(format="hf", field=field)
    with pytest.raises(DataError, match=message):
        import_tokens(tmp_path / "saved", options=options, tokenizer=wide_tokenizer, out=tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_broken_folders(store: TokenStore, tmp_path: Path, tokenizer: Tokenizer) -> None:
    options = ImportOptions(format="hf")

    def refused(message: str) -> None:
        with pytest.raises(DataError, match=message):
            import_tokens(tmp_path / "hf", options=options, tokenizer=tokenizer, out=tmp_path / "back")

    refused(r"cannot read the dataset's .*state\.json: No such file")
    export(store, out=tmp_path / "hf", options=ExportOptions(to="hf"))
    (tmp_path / "hf" / "lt-export.json").unlink()
    state = tmp_path / "hf" / "state.json"
    before = state.read_text()
    state.write_text("{}")
    refused(r"state\.json: not the state of a saved dataset")
    state.write_text(json.dumps({"_data_files": [{"filename": "../elsewhere.arrow"}]}))
    refused(r"'\.\./elsewhere\.arrow' is not a file of this folder")
    state.write_text(before)
    data = tmp_path / "hf" / "data-00000-of-00001.arrow"
    whole = data.read_bytes()
    data.write_bytes(whole[:-8])  # cut after the last batch: Arrow's own reader notices nothing
    assert pyarrow.ipc.open_stream(data.read_bytes()).read_all().num_rows == store.n_documents
    refused(r"data-00000-of-00001\.arrow: truncated Arrow stream \(no end mark\)")
    data.write_bytes(whole[:-5000] + whole[-8:])
    refused(r"data-00000-of-00001\.arrow")
    data.write_bytes(b"nothing of the kind")
    refused(r"data-00000-of-00001\.arrow: truncated Arrow stream")
