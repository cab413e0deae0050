"""Round trips through every format keep the tokens, and the document boundaries if the format has them."""

import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lt_data import Document, Tokenizer, TokenStore, prepare
from lt_data.exports import samples
from lt_data.exports.export import export
from lt_data.exports.import_tokens import ImportOptions, import_tokens
from lt_data.exports.options import ExportOptions
from lt_data.exports.samples import block_batches, document_batches, split_by_size

BOS, EOS = 0, 1  # of the tokenizer of these tests
DOCUMENTS = st.lists(st.lists(st.integers(2, 299), min_size=1, max_size=40), min_size=1, max_size=12)
FORMATS = ["hf", "megatron", "smp", "litespark"]


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "BATCH_TOKENS", 50)  # so that a few documents are several batches


def made(folder: Path, documents: list[list[int]], tokenizer: Tokenizer, *, marked: bool) -> TokenStore:
    prepare(
        [Document(ids=np.array(ids), source=str(i)) for i, ids in enumerate(documents)],
        tokenizer=tokenizer,
        out=folder / "store",
        bos=marked,
        eos=marked,
        shard_tokens=60,
    )
    return TokenStore(folder / "store")


def shards(store: TokenStore) -> list[bytes]:
    """The bytes of the tokens and of the document boundaries."""
    files = [path for path in sorted((store.path / "shards").iterdir()) if path.suffix in (".bin", ".idx")]
    assert files
    return [path.read_bytes() for path in files]


@pytest.mark.parametrize("to", FORMATS)
@settings(max_examples=6)
@given(
    documents=DOCUMENTS, marked=st.booleans(), seq_len=st.integers(1, 60), file_bytes=st.sampled_from([1, 130, None])
)
def test_the_store_comes_back(
    tokenizer: Tokenizer, to: str, documents: list[list[int]], marked: bool, seq_len: int, file_bytes: int | None
) -> None:
    blocks = to == "litespark"
    marked = marked or blocks  # what has no boundaries needs a mark of them
    options = ExportOptions(to=to, seq_len=seq_len if blocks else None, file_bytes=file_bytes)
    with tempfile.TemporaryDirectory() as name:
        store = made(Path(name), documents, tokenizer, marked=marked)
        report = export(store, out=Path(name) / "out", options=options)
        assert (report.tokens, report.dropped_tokens) == (store.n_tokens, 0)
        for boundaries in ("bos", "eos") if blocks else (None,):
            back = Path(name) / f"back-{boundaries}"
            done = import_tokens(
                Path(name) / "out",
                options=ImportOptions(format=to, boundaries=boundaries),
                tokenizer=tokenizer,
                out=back,
                shard_tokens=60,
            )
            assert shards(TokenStore(back)) == shards(store)
            assert done.padding == report.padding
            if to != "smp":  # where the note says so
                assert TokenStore(back).manifest.fingerprint == store.manifest.fingerprint


@pytest.mark.parametrize("to", ["hf", "smp"])
@settings(max_examples=5)
@given(documents=DOCUMENTS, seq_len=st.integers(1, 50), mode=st.sampled_from(["concat", "bfd"]))
def test_rows_come_back(tokenizer: Tokenizer, to: str, documents: list[list[int]], seq_len: int, mode: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        store = made(Path(name), documents, tokenizer, marked=False)
        export(
            store, out=Path(name) / "out", options=ExportOptions(to=to, seq_len=seq_len, packing=mode, file_bytes=200)
        )
        back = Path(name) / "back"
        import_tokens(Path(name) / "out", options=ImportOptions(format=to), tokenizer=tokenizer, out=back)
        rows = TokenStore(back)
        assert rows.n_tokens == store.n_tokens
        assert rows.lengths.max() <= seq_len
        tokens, expected = rows.tokens(0, rows.n_tokens), store.tokens(0, store.n_tokens)
        if mode == "concat":
            np.testing.assert_array_equal(tokens, expected)
        else:
            np.testing.assert_array_equal(np.sort(tokens), np.sort(expected))


@pytest.mark.parametrize("to", ["hf", "smp"])
def test_both_ways_twice(to: str, wide_store: TokenStore, wide_tokenizer: Tokenizer, tmp_path: Path) -> None:
    """An export of an import of an export is the export."""
    for number in range(2):
        source = wide_store if number == 0 else TokenStore(tmp_path / "back")
        export(source, out=tmp_path / f"out{number}", options=ExportOptions(to=to, file_bytes=9000))
        if number == 0:
            import_tokens(
                tmp_path / "out0",
                options=ImportOptions(format=to, bos=True, eos=True),
                tokenizer=wide_tokenizer,
                out=tmp_path / "back",
                shard_tokens=900,
            )
    names = sorted(path.name for path in (tmp_path / "out0").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "out1").iterdir())
    for name in names:
        assert (tmp_path / "out0" / name).read_bytes() == (tmp_path / "out1" / name).read_bytes()


@given(sizes=st.lists(st.integers(1, 30), max_size=40), most=st.integers(1, 60))
def test_runs_are_whole_items_and_as_few_as_fit(sizes: list[int], most: int) -> None:
    boundaries = split_by_size(np.array(sizes, np.int64), most).tolist()
    assert boundaries[0] == 0
    assert boundaries[-1] == len(sizes)
    for first, last in pairwise(boundaries):
        assert last > first
        assert sum(sizes[first:last]) <= most or last == first + 1
        if last < len(sizes):
            assert sum(sizes[first : last + 1]) > most


def test_batches_are_all_of_it(wide_store: TokenStore) -> None:
    """Bounded, whole documents, in order; blocks end in padding."""
    expected = wide_store.tokens(0, wide_store.n_tokens)
    batches = list(document_batches(wide_store, 3, 38))
    assert [batch.first for batch in batches] == np.cumsum(
        [3, *(batch.lengths.size for batch in batches[:-1])]
    ).tolist()
    begin, end = int(wide_store.offsets[3]), int(wide_store.offsets[38])
    np.testing.assert_array_equal(np.concatenate([batch.tokens for batch in batches]), expected[begin:end])
    assert all(batch.tokens.size == batch.lengths.sum() for batch in batches)
    assert all(batch.tokens.size <= samples.BATCH_TOKENS or batch.lengths.size == 1 for batch in batches)
    n = wide_store.n_tokens
    found = np.concatenate(list(block_batches(wide_store, 7, n + 200, 69_999)))
    np.testing.assert_array_equal(found, [*expected[7:], *[69_999] * 200])
