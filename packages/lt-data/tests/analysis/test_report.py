"""The page of a store: well-formed, whole by itself, escaped; and its charts."""

import base64
import hashlib
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from lt_data import DataError, Tokenizer, TokenStore, pack, prepare, stats
from lt_data.display.report import length_bars, render_page, write_report


class Page(HTMLParser):
    """Checks that elements are closed in order, and collects what a browser would load."""

    VOID = ("meta", "rect", "path")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.words: list[str] = []
        self.bars: list[float] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        values = dict(attrs)
        self.loads += [values[name] for name in ("src", "href", "xlink:href", "data", "action") if name in values]
        assert tag not in ("script", "link", "img", "iframe", "object", "b")
        if tag == "rect" and values.get("class") != "track":
            self.bars.append(float(values["width"]))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture
def named(tmp_path: Path, tokenizer: Tokenizer) -> TokenStore:
    """A store whose sources have names that are markup."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i, name in enumerate(["<b>&'\"x.txt", "東京.txt", "plain.txt"]):
        (folder / name).write_text("the quick brown fox " * 7 ** (i + 1), encoding="utf-8")
    prepare([str(folder)], tokenizer=tokenizer, out=tmp_path / "a <b> store")
    store = TokenStore(tmp_path / "a <b> store")
    pack(store, seq_len=64)
    pack(store, seq_len=64, mode="concat")
    return store


def test_a_manifest_cannot_be_markup(named: TokenStore) -> None:
    """A manifest that was not read, and so not checked: what it says is escaped all the same."""
    evil = "<script>alert(1)</script>"
    sources = replace(named.manifest.sources, listed=())
    object.__setattr__(sources, "sha256", evil)
    manifest = replace(named.manifest, sources=sources)
    object.__setattr__(manifest, "dtype", evil)
    page = render_page("x", replace(stats(named), fingerprint=evil, left_out={evil: 1}), manifest)
    assert "<script" not in page
    assert " ".join(Page(page).words).count(evil) == 4


def test_the_page_is_whole_by_itself(named: TokenStore, tmp_path: Path) -> None:
    (path,) = write_report(named, tmp_path / "report.html", duplicates=True, global_batch_size=2)
    text = path.read_text(encoding="utf-8")
    found = Page(text)
    assert found.loads == []
    assert not re.search(r"https?:|url\(|@import|//", text)
    (style,) = re.findall("<style>(.*)</style>", text, re.DOTALL)
    allowed = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'sha256-{allowed}'; script-src 'none'" in text
    assert not re.search("unsafe|style=", text)
    words = " ".join(found.words)
    for shown in ("a <b> store", "<b>&'\"x.txt", "東京.txt", "bfd-64", "concat-64", f"{named.n_documents:,}"):
        assert shown in words
    assert "exact duplicates in the store" in words
    assert "steps of 2 rows" in words
    assert "prefers-color-scheme:dark" in text
    assert "width=device-width" in text
    assert all(0 < width <= 100 for width in found.bars)
    again = render_page("x", stats(named), named.manifest)
    assert again == render_page("x", stats(named), named.manifest)


def test_the_histogram_shows_the_numbers(counting_store: Callable[..., TokenStore]) -> None:
    found = stats(counting_store([1, 2, 3, 4, 7, 20]))
    rows = [(name, one.value, one.fraction, two.value) for name, one, two in length_bars(found)]
    assert rows == [
        ("1", "1 (16.7%)", 0.5, "1 (2.7%)"),
        ("2 to 3", "2 (33.3%)", 1.0, "5 (13.5%)"),
        ("4 to 7", "2 (33.3%)", 1.0, "11 (29.7%)"),
        ("8 to 15", "0 (0.0%)", 0.0, "0 (0.0%)"),
        ("16 to 31", "1 (16.7%)", 0.5, "20 (54.1%)"),
    ]


def test_files_that_are_there_stay_unless_told(named: TokenStore, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    out.write_text("mine", encoding="utf-8")
    with pytest.raises(DataError, match="exists already"):
        write_report(named, out)
    assert out.read_text(encoding="utf-8") == "mine"
    write_report(named, out, overwrite=True)
    assert "a &lt;b&gt; store" in out.read_text(encoding="utf-8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a <b> store", "corpus", "report.html"]


# Older versions of matplotlib use names that newer ones of pyparsing call old when they are imported.
@pytest.mark.filterwarnings("ignore::DeprecationWarning:matplotlib")
def test_pictures(named: TokenStore, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    written = write_report(named, tmp_path / "report.html", png=tmp_path / "png")
    assert [path.name for path in written] == ["report.html", "lengths.png", "packs.png"]
    first = [path.read_bytes() for path in written]
    for content in first[1:]:
        assert content.startswith(b"\x89PNG\r\n")
        assert len(content) > 5000
        assert int.from_bytes(content[16:20], "big") == 1200
    write_report(named, tmp_path / "report.html", png=tmp_path / "png", overwrite=True)
    assert [path.read_bytes() for path in written] == first


def test_pictures_without_matplotlib(named: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match=r'pip install "lt-data\[plot\]"'):
        write_report(named, tmp_path / "report.html", png=tmp_path / "png")
    assert not (tmp_path / "report.html").exists()
