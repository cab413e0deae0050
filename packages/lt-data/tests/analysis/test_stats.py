import html
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lt_data import DataError, Document, Tokenizer, TokenStore, pack, prepare, split
from lt_data.analysis.stats import stats, steps_per_epoch
from lt_data.display.report import render_page, write_report
from lt_data.display.stats_text import format_stats


def test_numbers_of_a_known_store(counting_store: Callable[..., TokenStore]) -> None:
    store = counting_store([1, 2, 3, 4, 7, 20])
    pack(store, seq_len=8)
    pack(store, seq_len=8, mode="concat")
    found = stats(store)
    assert (found.documents, found.tokens, found.bytes_per_token) == (6, 37, 4.0)
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
    assert (concat.truncated_documents, concat.needlessly_truncated_documents, concat.is_current) == (3, 2, True)
    assert (bfd.truncation_rate, bfd.needless_truncation_rate) == (1 / 6, 0.0)
    assert (concat.truncation_rate, concat.needless_truncation_rate) == (3 / 6, 2 / 6)
    assert bfd.epoch is None
    assert found.duplicates is None
    stepped = stats(store, global_batch_size=2, dp_size=2)
    assert stepped.packs[0].epoch == steps_per_epoch(5, 2, 2)
    assert "2 steps of 2 rows (1 for each of 2 ranks, 16 tokens) + 1: 1 row remains for the" in format_stats(stepped)
    for options in ({"global_batch_size": 3, "dp_size": 2}, {"global_batch_size": 0}):
        with pytest.raises(DataError, match="must be a positive multiple of dp_size"):
            stats(store, **options)


def test_text_and_json(store: TokenStore, texts: list[str]) -> None:
    found = stats(store)
    text_tokens = store.n_tokens - 2 * store.n_documents
    assert found.bytes_per_token == sum(len(text.encode()) for text in texts) / text_tokens
    assert sum(b.documents for b in found.length_histogram) == store.n_documents
    assert sum(b.tokens for b in found.length_histogram) == store.n_tokens
    assert json.loads(json.dumps(found.to_dict()))["manifest"]["left_out"]["empty"]["documents"] == 1


def test_pack_left_over_from_another_store_is_marked(
    store: TokenStore, counting_store: Callable[..., TokenStore]
) -> None:
    other = counting_store([5] * 500)
    pack(other, seq_len=8)
    (other.path / "packs").rename(store.path / "packs")
    (found,) = stats(store).packs
    assert not found.is_current
    assert found.padding == pytest.approx(500 * 3)


def test_exact_duplicates(tmp_path: Path, tokenizer: Tokenizer) -> None:
    texts = ["one", "two", "one", "three", "two", "one", "onet"]
    documents = [Document(text=text, source=str(i)) for i, text in enumerate(texts)]
    prepare(documents, tokenizer=tokenizer, out=tmp_path / "store", shard_tokens=8)
    store = TokenStore(tmp_path / "store")
    found = stats(store, duplicates=True).duplicates
    assert found == (3, int(store.lengths[[2, 4, 5]].sum()))
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
        assert html.escape(line) in render_page(stats(store), "x")
    assert "left out, map: long  10\n" in format_stats(stats(whole))
    split_line = f"train of store {whole.manifest.fingerprint}, share 3/10 held out"
    assert f"{'split':<20} {split_line}\n" in format_stats(stats(train))
    assert split_line in render_page(stats(train), "x")
    assert json.loads(json.dumps(stats(train).to_dict()))["manifest"]["split"]["side"] == "train"
    assert "\nsplit " not in format_stats(stats(whole))


def test_the_report_is_one_page_that_quotes_everything(store: TokenStore, tmp_path: Path) -> None:
    pack(store, seq_len=64)
    found, out = stats(store, global_batch_size=4), tmp_path / "new" / "report.html"
    write_report(found, "<b>&", out)
    page = out.read_text(encoding="utf-8")
    assert "<h1>&lt;b&gt;&amp;: token store</h1>" in page
    assert page.count("<meter") == 2 * len(found.length_histogram)
    assert f"<td>bfd-64<td>{found.packs[0].rows}<td>" in page
    assert "steps of 4 rows" in page
    assert "<script" not in page
    assert "http" not in page.replace("http-equiv", "")
    with pytest.raises(DataError, match="exists already; give another name, or --overwrite"):
        write_report(found, "x", out)
    write_report(found, "x", out, overwrite=True)
    assert [path.name for path in out.parent.iterdir()] == ["report.html"]
