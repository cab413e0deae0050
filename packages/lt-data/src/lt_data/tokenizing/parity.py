"""Comparison of the ids of two engines, and difficult strings for it.

Programs that encode the same `tokenizer.json` are known to differ in literal special strings, runs of whitespace,
contractions, digits, combining marks, control characters, scripts and very long words. The strings below contain each
of these, and `difficult_texts` adds every special and added token of the tokenizer among letters, spaces and other
tokens. Unicode classes of code points, which differ too, are probed where they occur
(lt_data.tokenizing.verified_engine).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from lt_data.tokenizing.tokenizer import Tokenizer

if TYPE_CHECKING:
    from lt_data.tokenizing.engine import TokenizerEngine

SAMPLE_CHARACTERS = 2000  # of every batch
_MAX_TOKENS = 300  # special and added tokens that are tested individually
_MESSAGE_CHARACTERS = 60  # characters of a text in a message

_TEXTS = (
    "",
    " ",
    "\n",
    "   leading and trailing   ",
    "a  b   c    d\t\te \t f\n\n\ng\n \n h\r\ni\r\n\r\nj\rk\x0bl\x0cm\x85n",
    "a\u00a0b\u00a0\u00a0c\u2028d\u2029e\u3000f\u200bg\u200c\u200dh\ufeffi\u1680j\u2003\u2003k\u202fl\u205fm\u180en",
    "don't DON'T it's IT'S we'll WE'LL I'm they've you'd we're o'clock rock'n'roll 'tis 's 'S ''s l\u2019homme \u2019s",
    "1 12 123 1234 12345 123456 1234567 3.14159 1,000,000 0x7fFF 1e-10 \u0661\u0662\u0663\u0664 "
    "\u00b2\u00b3\u00b9 \u2167 \u00bd \u2460",
    "def f(x):\n    return [x**2 for _ in range(10)]  # done\n\n\nclass A:\n\tpass\n",
    "https://example.org/a?b=c&d=%20e#f user@example.org C:\\dir\\file /usr/share/doc ~!@#$%^&*()_+`-={}|[]:\";'<>?,./",
    "\x00\x00 nul \x01\x02\x1b[31m\x7f \ufffd \ufffe \uffff \U0010ffff \ue000 \U000f0000",
    "cafe\u0301 caf\u00e9 \u1e9b\u0323 \ufb01ne \u212b \u00c5 A\u030a \u0130 \u0131 \u017f \u00df \u1e9e \u03c2",
    "\ud55c\uad6d\uc5b4 \u1112\u1161\u11ab \u6771\u4eac\u90fd "
    "\u3072\u3089\u304c\u306a\u30ab\u30bf\u30ab\u30ca\uff76\uff85 \uff11\uff12\uff13",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 "
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd \u0440\u0443\u0441 \u0395\u03bb \u10d0\u10d1",
    "\U0001f98a \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \U0001f44d\U0001f3fd "
    "\u2764\ufe0f 1\ufe0f\u20e3 \U0001d400\U0001d7ce \U00020000\U0002a6df",
    "\u2581 \u2581\u2581a \u0120x \u010ay <0x41> <0x0A> \u2581<s> [INST] <<SYS>>",
    "a" * 3000,
    " " * 1500 + "x" + "\n" * 700 + "\t" * 300 + "- " * 500 + "=" * 900,
    "ACGT" * 700 + "\u6771" * 900 + "\U0001f98a" * 200 + "0123456789" * 150,
)


def difficult_texts(tokenizer: Tokenizer) -> list[str]:
    """Return strings on which engines are likely to differ."""
    tokens = [*tokenizer.special_strings, *tokenizer.added_strings][:_MAX_TOKENS]
    in_context = [
        f"a{token}b {token} {token}{token}\n{token}\n {token[:-1]} {token.upper()} 1{token}1 {token.strip()}  {token}"
        for token in tokens
    ]
    return [*_TEXTS, *in_context, "".join(tokens)]


def describe_difference(fast: "TokenizerEngine", reference: "TokenizerEngine", texts: Sequence[str]) -> str:
    """Describe the first difference of the ids of the texts; empty if they are equal."""
    for text in texts:  # one by one, since the reference needs much memory per call
        (actual,), (expected,) = fast.encode([text]), reference.encode([text])
        if not np.array_equal(actual, expected):
            size = min(actual.size, expected.size)
            unequal = np.flatnonzero(actual[:size] != expected[:size])
            position = int(unequal[0]) if unequal.size else size
            shown = f"{text[:_MESSAGE_CHARACTERS]!r}{'...' if len(text) > _MESSAGE_CHARACTERS else ''}"
            return f"id {position} of {expected.size} of the text {shown}"
    return ""


def sample_text(texts: Sequence[str]) -> str:
    """Return a piece from the middle of a batch, for continuous comparison."""
    text = texts[len(texts) // 2]
    return text[len(text) // 2 :][:SAMPLE_CHARACTERS]
