r"""Splitting of a long document into pieces whose concatenated ids are those of the whole document.

`tokenizers` needs some hundred bytes of memory per byte of text, so a document of 100 MB is not encoded at once. Texts
are split only where it provably does not change the ids, and only for two kinds of tokenizers.

Byte-level BPE with a known split (GPT-2, Llama 3, Qwen 2, o200k): those regexes look ahead and never behind, and none
of their alternatives continues from a non-whitespace character into a space, or from a letter or digit into a line end.
So a space after a non-whitespace character always begins a new word.

SentencePiece-style BPE (a space is U+2581 and there is no split, or only one before it): a merge makes a token of the
vocabulary. If no token has U+2581 after another character, no merge crosses the boundary before a space, and both sides
are independent. A normalizer that prepends U+2581 to each text restores the space at which the text was split.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from lt_data.tokenizing.files import MODEL_FILE
from lt_data.tokenizing.tokenizer import LLAMA3_SPLIT_REGEX, SpecialTokensAs

_SPACE = "\u2581"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = LLAMA3_SPLIT_REGEX.replace(r"\p{N}{1,3}", r"\p{N}")
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{_ENDINGS}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{_ENDINGS}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KNOWN_SPLITS = (_GPT2, LLAMA3_SPLIT_REGEX, _QWEN2, _O200K)

# Besides spaces: a line end after a letter or digit, and punctuation after an ideograph or kana.
_WORD_BOUNDARY = re.compile(
    "(?<=[^\\s]) |(?<=[A-Za-z0-9\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5])\n|"
    "(?<=[\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5])[\u3001\u3002\uff01\uff0c\uff1f]"
)
_BEFORE_SPACE = re.compile(f"(?<=[^\\s{_SPACE}]) (?=[^\\s{_SPACE}])")
_BOUNDARY_CHARACTERS = re.compile(f"[\\s{_SPACE}\u3001\u3002\uff01\uff0c\uff1f]")


class TextSplitter:
    """Splitter of texts for one tokenizer.

    Attributes:
        can_split: whether this kind of tokenizer allows splitting; if not, `split` returns the whole text.
    """

    def __init__(self, files: Mapping[str, bytes], *, special_tokens_as: SpecialTokensAs) -> None:
        model: dict[str, Any] = json.loads(files[MODEL_FILE])
        added: list[dict[str, Any]] = model.get("added_tokens") or []
        # Added tokens, which are matched before the regex split, must not extend across a boundary.
        crosses_boundary = any(
            token.get("lstrip")
            or token.get("rstrip")
            or token.get("single_word")
            or _BOUNDARY_CHARACTERS.search(token["content"])
            for token in added
        )
        # A normalizer is applied between added tokens, so no split is made next to one.
        self._added_tokens = tuple(
            token["content"] for token in added if special_tokens_as == "ids" or not token.get("special")
        )
        self._drop_space = False  # whether the space at a split is dropped
        self._boundary_pattern: re.Pattern[str] | None = None
        if crosses_boundary:
            pass
        elif _is_known_byte_level(model):
            self._boundary_pattern = _WORD_BOUNDARY
        elif _is_sentencepiece(model):
            self._boundary_pattern = _BEFORE_SPACE
            self._drop_space = model.get("normalizer") is not None
        self.can_split = self._boundary_pattern is not None

    def split(self, text: str, characters: int) -> list[str]:
        """Split a text into pieces of about that many characters, longer where there is no boundary."""
        if self._boundary_pattern is None:
            return [text]
        pieces: list[str] = []
        begin = search = 0
        while match := self._boundary_pattern.search(text, max(search, begin + characters)):
            end = match.start()
            search = end + 1
            if not self._added_tokens or not (
                text.endswith(self._added_tokens, 0, end) or text.startswith(self._added_tokens, end + 1)
            ):
                pieces.append(text[begin:end])
                begin = end + 1 if self._drop_space else end
        pieces.append(text[begin:])
        return pieces


def _is_known_byte_level(model: dict[str, Any]) -> bool:
    normalizer = model.get("normalizer")
    if model["model"].get("type") != "BPE" or (normalizer is not None and normalizer.get("type") != "NFC"):
        return False
    steps: list[dict[str, Any]] = _sequence_steps(model.get("pre_tokenizer"), "pretokenizers")
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return False
    if len(steps) == 1:
        return steps[0].get("use_regex", True)
    split = steps[0]
    return (
        len(steps) == 2
        and not steps[1].get("use_regex", True)
        and split.get("type") == "Split"
        and split.get("behavior") == "Isolated"
        and not split.get("invert")
        and split.get("pattern", {}).get("Regex") in KNOWN_SPLITS
    )


def _is_sentencepiece(model: dict[str, Any]) -> bool:
    bpe = model["model"]
    if bpe.get("type") != "BPE" or bpe.get("ignore_merges") or bpe.get("continuing_subword_prefix"):
        return False
    if bpe.get("end_of_word_suffix") or _SPACE not in bpe["vocab"]:
        return False
    # no token may have a character before U+2581, such as "\n▁": it would join the two sides
    if any(_SPACE in token.lstrip(_SPACE) for token in bpe["vocab"]):
        return False
    normalizers = _sequence_steps(model.get("normalizer"), "normalizers")
    pre_tokenizers = _sequence_steps(model.get("pre_tokenizer"), "pretokenizers")
    if not pre_tokenizers:
        prepend = {"type": "Prepend", "prepend": _SPACE}
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        return normalizers == [prepend, replace]
    return (
        not normalizers
        and [step.get("type") for step in pre_tokenizers] == ["Metaspace"]
        and pre_tokenizers[0].get("replacement") == _SPACE
        and pre_tokenizers[0].get("prepend_scheme") in ("always", "first", "never")
    )


def _sequence_steps(part: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return part[name] if part.get("type") == "Sequence" else [part]
