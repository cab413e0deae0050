import pytest

from lt_data import DataError, pack
from lt_data.analysis.stats import stats, steps_per_epoch
from lt_data.display.report import write_report
from lt_data.display.stats_text import format_stats


def test_numbers_of_a_known_store(counting_store):
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
    assert (bfd.epoch, found.duplicates) == (None, None)
    stepped = stats(store, global_batch_size=2, dp_size=2)
    assert stepped.packs[0].epoch == steps_per_epoch(5, 2, 2)
    assert "2 steps of 2 rows (1 for each of 2 ranks, 16 tokens) + 1: 1 row remains for the" in format_stats(stepped)
    for options in ({"global_batch_size": 3, "dp_size": 2}, {"global_batch_size": 0}):
        with pytest.raises(DataError, match="must be a positive multiple of dp_size"):
            stats(store, **options)


def test_the_report_is_one_page_that_quotes_everything(store, tmp_path):
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
