"""Text of others in the cards is shown as it is: a real Markdown reader finds no markup, a real shell one word."""

import subprocess

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from lt_data.display.terminal import escape_controls
from lt_trainer.release.markdown import plain, table
from lt_trainer.release.script import quote

READER = MarkdownIt("commonmark").enable(["table", "strikethrough"])
NASTY = (
    "a|b`c``d",
    "<img src=x onerror=alert(1)>&lt;",
    "[x](javascript:alert(1)) ![y](z)",
    "*a* _b_ __c__ ~~d~~ a_b_c $e$",
    "# h",
    "- x",
    "1. x",
    "---",
    "===",
    "\n```\n# h\n| a | b |\n|---|---|\n",
    "\x1b[31mred\u202ex\u2028\x85\ud800",
    "\\|\\\\|",
    "|",
    "    code",
    "https://x.org <https://y.org> a@b.org",
    "[^1] [ ] :a:",
)
TEXTS = st.one_of(st.text(st.sampled_from("ab1 _*`|\\<>[]()!#&;$~=+-.\n\t\x1b:/"), max_size=30), st.text(max_size=30))


def nasty_examples(test):  # type: ignore[no-untyped-def]  # a decorator of many
    for text in NASTY:
        test = example(text)(test)
    return test


def shown(text: str) -> str:
    """What a reader sees of a text: its words, control characters escaped."""
    return " ".join(escape_controls(text, keep="").split())


def inline_of(markdown: str, kinds: list[str]) -> list[list[Token]]:
    """The inline tokens of each block, which must be of these kinds."""
    tokens = READER.parse(markdown)
    assert [token.type for token in tokens if token.nesting >= 0 and token.type != "inline"] == kinds, markdown
    return [token.children or [] for token in tokens if token.type == "inline"]


@nasty_examples
@given(TEXTS)
def test_plain_text_has_no_markup(text: str) -> None:
    for begin, kinds in (
        ("# ", ["heading_open"]),
        ("x\n\n", ["paragraph_open", "paragraph_open"]),
        ("- ", ["bullet_list_open", "list_item_open", "paragraph_open"]),
    ):
        if not shown(text):
            continue
        last = inline_of(f"{begin}{plain(text)}\n", kinds)[-1]
        assert {token.type for token in last} == {"text"}, last
        assert "".join(token.content for token in last) == shown(text)


@nasty_examples
@given(TEXTS)
def test_a_table_keeps_its_shape(text: str) -> None:
    kinds = ["table_open", "thead_open", "tr_open", "th_open", "th_open", "th_open", "tbody_open"]
    kinds += ["tr_open", "td_open", "td_open", "td_open"]
    cells = inline_of(table(("a", "b", "c"), [(plain(text), plain(text), "end")]), kinds)[3:]
    assert [cell.content for cell in cells[2]] == ["end"]
    assert "".join(token.content for token in cells[0]) == shown(text)
    assert "".join(token.content for token in cells[1]) == shown(text)
    assert {token.type for token in (*cells[0], *cells[1])} <= {"text"}


@pytest.mark.parametrize(
    "text", [*NASTY, "it's", "$(touch pwned)", "-x", "", "é", "\udcff", "a\nb", "`id`", "~", "a b"]
)
def test_a_shell_reads_one_word(text: str) -> None:
    text = text.replace("\ud800", "")
    assert quote(text).isprintable()
    done = subprocess.run(["bash", "-c", f"printf '%s\\0' {quote(text)}"], capture_output=True, check=True)
    assert done.stdout == text.encode("utf-8", "surrogateescape") + b"\0"
