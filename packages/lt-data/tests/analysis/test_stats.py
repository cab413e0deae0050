import html
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lt_data import Document, Tokenizer, TokenStore, pack, prepare, split, stats
from lt_data.display.report import render_page
from lt_data.display.stats_text import format_stats


def test_numbers_of_a_known_store(counting_store: Callable[..., TokenStore]) -> None:
    store = counting_store([1, 2, 3, 4, 7, 20])
    pack(store, seq_len=8)
    pack(store, seq_len=8, mode="concat")
    found = stats(store)
    assert (found.documents, found.tokens, found.text_bytes, found.bytes_per_token) == (6, 37, 148, 4.0)
    assert (found.min_length, found.max_length, found.median_length, found.mean_length) == (1, 20, 3.5, 37 / 6)
    assert [(b.min_tokens, b.max_tokens, b.documents, b.tokens) for b in found.length_histogram] == [
        (1, 1, 1, 1),
        (2, 3, 2, 5),
        (4, 7, 2, 11),
        (8, 15, 0, 0),
        (16, 31, 1, 20),
    ]
    bfd, concat = found.packs
    # 20 = 8 + 8 + 4: rows 8 | 8 | 7 + 1 | 4 + 4 | 3 + 2.
    assert (bfd.name, bfd.rows, bfd.padding, bfd.valid_tokens) == ("bfd-8", 5, 3, 31)
    assert (bfd.fill_rate, bfd.truncated_documents, bfd.needlessly_truncated_documents) == (37 / 40, 1, 0)
    # Cuts at 8, 16, 24, 32: in the documents [6, 10), [10, 17) and [17, 37).
    assert (concat.rows, concat.padding, concat.valid_tokens) == (5, 3, 36)
    assert (concat.truncated_documents, concat.needlessly_truncated_documents, concat.current) == (3, 2, True)
    assert (bfd.padding_rate, bfd.truncation_rate, bfd.needless_truncation_rate) == (3 / 40, 1 / 6, 0.0)
    assert (concat.truncation_rate, concat.needless_truncation_rate) == (3 / 6, 2 / 6)
    assert bfd.steps == ()
    assert found.duplicates is None
    (steps,) = stats(store, global_batch_size=2, dp_size=2).packs[0].steps
    assert (steps.steps, steps.remainder) == (2, 1)


def test_text_and_json(store: TokenStore, texts: list[str]) -> None:
    found = stats(store)
    text_tokens = store.n_tokens - 2 * store.n_documents
    assert found.bytes_per_token == sum(len(text.encode()) for text in texts) / text_tokens
    assert sum(b.documents for b in found.length_histogram) == store.n_documents
    assert sum(b.tokens for b in found.length_histogram) == store.n_tokens
    assert json.loads(json.dumps(found.to_dict()))["empty_documents"] == 1


def test_pack_left_over_from_another_store_is_marked(
    store: TokenStore, counting_store: Callable[..., TokenStore]
) -> None:
    other = counting_store([5] * 500)
    pack(other, seq_len=8)
    (other.path / "packs").rename(store.path / "packs")
    (found,) = stats(store).packs
    assert not found.current
    assert found.padding == pytest.approx(500 * 3)


def test_exact_duplicates(tmp_path: Path, tokenizer: Tokenizer) -> None:
    texts = ["one", "two", "one", "three", "two", "one", "onet"]
    documents = [Document(text=text, source=str(i)) for i, text in enumerate(texts)]
    prepare(documents, tokenizer=tokenizer, out=tmp_path / "store", shard_tokens=8)
    store = TokenStore(tmp_path / "store")
    found = stats(store, duplicates=True).duplicates
    assert found is not None
    assert (found.documents, found.tokens) == (3, int(store.lengths[[2, 4, 5]].sum()))
    assert "exact duplicates     3 documents" in format_stats(stats(store, duplicates=True))


def test_map_and_split_that_made_a_store_are_shown(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "long_only.py").write_text(
        "from lt_data import LeftOut\n\n"
        "def keep(record, most):\n    return record if len(record['text']) < most else LeftOut('long')\n",
        encoding="utf-8",
    )
    documents = [Document(text="x" * n, source=str(n)) for n in range(1, 80)]
    prepare(documents, tokenizer=tokenizer, out=tmp_path / "all", record_map="long_only:keep", map_args={"most": 70})
    split(TokenStore(tmp_path / "all"), holdout="30%", train=tmp_path / "train", validation=tmp_path / "validation")
    whole, train = (TokenStore(tmp_path / name) for name in ("all", "train"))
    assert whole.manifest.map is not None
    line = f'long_only:keep, code {whole.manifest.map.sha256}, arguments {{"most": 70}}'
    for store in (whole, train):
        assert f"{'map':<20} {line}\n" in format_stats(stats(store))
        assert html.escape(line) in render_page("x", stats(store), store.manifest)
    assert "left out, map: long  10\n" in format_stats(stats(whole))
    split_line = f"train of store {whole.manifest.fingerprint}, share 3/10 held out"
    assert f"{'split':<20} {split_line}\n" in format_stats(stats(train))
    assert split_line in render_page("x", stats(train), train.manifest)
    assert json.loads(json.dumps(stats(train).to_dict()))["split"]["side"] == "train"
    assert "\nsplit " not in format_stats(stats(whole))
