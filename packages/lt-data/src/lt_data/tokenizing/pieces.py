r"""Cutting one long document into pieces whose ids, one after the other, are those of the whole document.

`tokenizers` needs some hundred bytes of memory per byte of a text, so a document of 100 MB is not given to it at once.
A cut is made only where it provably changes nothing, and only for tokenizers of two kinds; others get the whole text.

Byte-level BPE with a known split (GPT-2, Llama 3, Qwen 2, o200k): those regexes look ahead and never behind, and none
of their alternatives goes on from a character that is no white space into a space, or from a letter or digit into a
line end. So a space after anything but white space begins a word of its own, whatever stands around it.

SentencePiece-style BPE (a space is U+2581 and no split, or only one before it): a merge makes a token of the
vocabulary. Where no token holds U+2581 after another character, no merge crosses the border before a space, and both
sides are independent. A normalizer that puts U+2581 before each text gives back the space at which the text was cut.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from lt_data.tokenizing.files import MODEL_FILE
from lt_data.tokenizing.tokenizer import SPLIT, Specials

_SPACE = "\u2581"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{_ENDINGS}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{_ENDINGS}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KNOWN_SPLITS = (_GPT2, SPLIT, _QWEN2, _O200K)

# Beside spaces: a line end after a letter or digit, and punctuation after an ideograph or a kana.
_WORD_BORDER = re.compile(
    "(?<=[^\\s]) |(?<=[A-Za-z0-9\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5])\n|"
    "(?<=[\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5])[\u3001\u3002\uff01\uff0c\uff1f]"
)
_BEFORE_SPACE = re.compile(f"(?<=[^\\s{_SPACE}]) (?=[^\\s{_SPACE}])")
_AT_BORDERS = re.compile(f"[\\s{_SPACE}\u3001\u3002\uff01\uff0c\uff1f]")


class Cutter:
    """Cuts texts for one tokenizer.

    Attributes:
        possible: whether this tokenizer is of a kind that allows it; else each text stays whole.
    """

    def __init__(self, files: Mapping[str, bytes], *, specials: Specials) -> None:
        model: dict[str, Any] = json.loads(files[MODEL_FILE])
        added: list[dict[str, Any]] = model.get("added_tokens") or []
        # Tokens that are searched in the text before it is split must neither cross a border nor reach over one.
        reaching = any(
            token.get("lstrip")
            or token.get("rstrip")
            or token.get("single_word")
            or _AT_BORDERS.search(token["content"])
            for token in added
        )
        # A normalizer works on what stands between such tokens, so no cut is made beside one of them.
        self._added = tuple(token["content"] for token in added if specials == "ids" or not token.get("special"))
        self._drop = False  # whether the space at which a text is cut is left out
        self._border: re.Pattern[str] | None = None
        if reaching:
            pass
        elif _is_known_byte_level(model):
            self._border = _WORD_BORDER
        elif _is_sentencepiece(model):
            self._border = _BEFORE_SPACE
            self._drop = model.get("normalizer") is not None
        self.possible = self._border is not None

    def cut(self, text: str, characters: int) -> list[str]:
        """The text in pieces of about that many characters; longer ones where there is no place to cut."""
        if self._border is None:
            return [text]
        pieces: list[str] = []
        begin = search = 0
        while found := self._border.search(text, max(search, begin + characters)):
            place = found.start()
            search = place + 1
            if not self._added or not (text.endswith(self._added, 0, place) or text.startswith(self._added, place + 1)):
                pieces.append(text[begin:place])
                begin = place + 1 if self._drop else place
        pieces.append(text[begin:])
        return pieces


def _is_known_byte_level(model: dict[str, Any]) -> bool:
    normalizer = model.get("normalizer")
    if model["model"].get("type") != "BPE" or (normalizer is not None and normalizer.get("type") != "NFC"):
        return False
    steps: list[dict[str, Any]] = _steps(model.get("pre_tokenizer"), "pretokenizers")
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
    # "\n▁" may not be one token either: any character before the mark joins the two sides.
    if any(_SPACE in token.lstrip(_SPACE) for token in bpe["vocab"]):
        return False
    normalizers = _steps(model.get("normalizer"), "normalizers")
    before = _steps(model.get("pre_tokenizer"), "pretokenizers")
    if not before:
        prepend = {"type": "Prepend", "prepend": _SPACE}
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        return normalizers == [prepend, replace]
    return (
        not normalizers
        and [step.get("type") for step in before] == ["Metaspace"]
        and (before[0].get("replacement") == _SPACE and before[0].get("prepend_scheme") in ("always", "first", "never"))
    )


def _steps(part: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return part[name] if part.get("type") == "Sequence" else [part]
