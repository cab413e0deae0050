"""Texts and files of a stranger: other fields, ways out of the folder, markup and shell words change nothing."""

import json
import subprocess
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token
from pydantic import ValidationError

from lt_ckpt.file_names import check_name
from lt_data.display.terminal import escape_controls
from lt_trainer.release.bundle import Release, check_inside
from lt_trainer.release.data_files import SourceEntry, name_in_release
from lt_trainer.release.filtering import TextFilter
from lt_trainer.release.markdown import plain, table
from lt_trainer.release.script import quote

ENTRY: dict[str, Any] = {
    **{"store": "train", "path": "a.txt", "bytes": 1, "sha256": "0" * 64, "documents": None, "tokens": 3},
    **{"license": "", "redistribute": False, "url": "", "file": "sources/train/000000-a.txt", "left_out": ""},
}
STORE = {"field": "data.store", "fingerprint": "ab", "joined": False}
RELEASE: dict[str, Any] = {
    **{"commit": "", "code_license": "Apache-2.0", "date": "2026-01-02", "step": 8, "earlier_steps": [6]},
    **{"python": "3.11.7", "stores": {"train": STORE}},
}
READER = MarkdownIt("commonmark").enable(["table", "strikethrough"])
NASTY = (
    *("a|b`c``d", "<img src=x onerror=alert(1)>&lt;", "[x](javascript:alert(1)) ![y](z)", "\\|\\\\|", "|", "    code"),
    *("*a* _b_ __c__ ~~d~~ a_b_c $e$", "# h", "- x", "1. x", "2) x", "---", "===", "[^1] [ ] :a:", "+ x"),
    *("\n```\n# h\n| a |\n|---|\n", "\x1b[31mred\u202ex\u2028\x85\ud800", "https://x.org <https://y.org> a@b.org"),
)


@pytest.mark.parametrize(
    ("record", "field", "value"),
    [
        *[(ENTRY, "file", name) for name in ("../../etc/passwd", "/etc/passwd", "sources//x", "sources/../x", "x/\0")],
        *[(ENTRY, "more", 1), (RELEASE, "format", "another"), (RELEASE, "version", 2)],
        *[(RELEASE, "python", "--help"), (RELEASE, "python", "3.11.7\n"), (RELEASE, "stores", {"../../x": STORE})],
    ],
)
def test_a_record_of_another_shape(record: dict[str, Any], field: str, value: Any) -> None:
    model = SourceEntry if record is ENTRY else Release
    assert record.items() <= model.model_validate_json(json.dumps(record)).model_dump().items()
    with pytest.raises(ValidationError, match=field):
        model.model_validate_json(json.dumps(record | {field: value}))


def test_names_of_sources_in_the_release() -> None:
    assert name_in_release("a/b-c.txt") == "b-c.txt"
    assert name_in_release("-rf") == "-rf.txt", "as which a file without a suffix is read"
    for path in ("a/..", "a/", ".", "COMMIT", "a/b c", "x.org/a?b=c", "x/" + "y" * 255, "\x1b\udcff\\"):
        name = f"sources/train/000000-{name_in_release(path)}"
        assert check_name(name, path) == name
        assert check_inside(name) == name


def inline_of(markdown: str, kinds: list[str]) -> list[list[Token]]:
    """The inline tokens of each block, which must be of these kinds."""
    tokens = READER.parse(markdown)
    assert [token.type for token in tokens if token.nesting >= 0 and token.type != "inline"] == kinds, markdown
    return [token.children or [] for token in tokens if token.type == "inline"]


def check_shown(text: str) -> None:
    """Assert that a text is all of its heading, paragraph, item of a list and cell of a table."""
    shown = " ".join(escape_controls(text, keep="").split())
    for begin, kinds in (
        ("# ", ["heading_open"]),
        ("x\n\n", ["paragraph_open"] * 2),
        ("- ", ["bullet_list_open", "list_item_open", "paragraph_open"]),
    ):
        last = inline_of(f"{begin}{plain(text)}\n", kinds)[-1] if shown else []
        assert {token.type for token in last} <= {"text"}, last
        assert "".join(token.content for token in last) == shown
    kinds = ["table_open", "thead_open", "tr_open", "th_open", "th_open", "tbody_open", "tr_open", "td_open", "td_open"]
    cell, end = inline_of(table(("a", "b"), [(plain(text), "end")]), kinds)[2:]
    assert [token.content for token in end] == ["end"]
    assert "".join(token.content for token in cell) == shown
    assert {token.type for token in cell} <= {"text"}


@given(st.one_of(st.text(st.sampled_from("ab1 _*`|\\<>[]()!#&;$~=+-.\n\t\x1b:/"), max_size=30), st.text(max_size=30)))
def test_plain_text_has_no_markup_and_a_table_keeps_its_shape(text: str) -> None:
    check_shown(text)


@pytest.mark.parametrize("text", [*NASTY, "it's", "$(touch pwned)", "-x", "", "é", "\udcff", "a\nb", "~", "a b"])
def test_a_card_shows_the_text_and_a_shell_reads_one_word(text: str) -> None:
    check_shown(text)
    text = text.replace("\ud800", "")
    assert quote(text).isprintable()
    done = subprocess.run(["bash", "-c", f"printf '%s\\0' {quote(text)}"], capture_output=True, check=True)
    assert done.stdout == text.encode("utf-8", "surrogateescape") + b"\0"


FILTER = TextFilter(hosts=["node17.lab", "node17"], users=["ada"], folders=["/scratch/p1"], homes=["/own"])
HOME = "/" + "home"


@pytest.mark.parametrize(
    ("text", "filtered"),
    [
        ("hf_" + "a" * 30 + " ghp_" + "C" * 30 + " AKIA" + "ABCDEFGH12345678", "<secret> <secret> <secret>"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----.", "<secret>."),
        ("s3://ada:hunter2@store/x", "s3://<secret>@store/x"),
        (f"{HOME}/ada/x /Users/grace/y /own/z /scratch/p1/run", "<home>/x <home>/y <home>/z <folder>/run"),
        ("on node17.lab, node17: ada at 10.1.2.3, 127.0.0.1", "on <host>, <host>: <user> at <host>, 127.0.0.1"),
        ("adam node170 /owned /scratch/p12 1.2.3.4.5 /x/own", "adam node170 /owned /scratch/p12 1.2.3.4.5 /x/own"),
    ],
)
def test_what_must_not_be_published_becomes_a_placeholder(text: str, filtered: str) -> None:
    assert FILTER.apply(text) == filtered
    assert FILTER.apply(filtered) == filtered
