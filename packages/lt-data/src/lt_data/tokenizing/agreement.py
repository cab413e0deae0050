r"""An engine that is used for the texts that it provably splits as the reference does; the others go to the reference.

Two programs that split by the same regex can still differ: each brings its own Unicode tables, and a code point that is
a letter in the newer one is unassigned in the older one. So each code point that occurs in a text is tried once, in
both engines, before the fast one sees the text: with the tokenizer's own normalizer and split, among letters, digits,
punctuation, spaces and line ends, under a model of single bytes that merges a neighbour with the first or last byte of
another character, so that the ids show which characters stand in one word. A text with a code point on which the two
differ is encoded by the reference.

Tokenizers without a split (SentencePiece style) use no Unicode table, and nothing has to be tried. Cost: 0.1 ms per
distinct code point, and 3 ms per MB of text that is not ASCII.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lt_data.errors import DataError
from lt_data.tokenizing.files import MODEL_FILE
from lt_data.tokenizing.tokenizer import Tokenizer

if TYPE_CHECKING:
    from lt_data.tokenizing.engine import Engine

_UNKNOWN, _SAME, _OTHER = 0, 1, 2
_NEIGHBOURS = "aA!1' \n"
_PROBE = "a{0}a A{0}A a{0}A !{0}! 1{0}1 {0} {0}\n{0}\n '{0}e '{0} e{0}\u0323\u0301 {0}{0}{0}"
_TABLE_FREE = ("Prepend", "Replace")  # normalizers


class AgreedEngine:
    """Encodes with a fast engine where it agrees with the reference.

    Args:
        tokenizer: whose ids.
        fast: the engine.
        reference: the engine that is right by definition.
        make_fast: the fast engine for the files of another tokenizer.
        make_reference: likewise.

    Attributes:
        others: texts so far that the reference encoded.

    Raises:
        DataError: nothing is known of how this kind of tokenizer splits.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        fast: "Engine",
        reference: "Engine",
        make_fast: Callable[[Mapping[str, bytes]], "Engine"],
        make_reference: Callable[[Mapping[str, bytes]], "Engine"],
    ) -> None:
        self.others = 0
        self._fast = fast
        self._reference = reference
        self._known: np.ndarray | None = None
        probe = _probe_model(json.loads(tokenizer.files[MODEL_FILE]))
        if probe is not None:
            files = {MODEL_FILE: json.dumps(probe).encode()}
            self._probes = (make_fast(files), make_reference(files))
            self._known = np.zeros(0x110000, np.uint8)
            self._try(np.arange(128))

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """One uint32 array of ids per text."""
        if self._known is None:
            return self._fast.encode(texts)
        agreed = [self._agreed(text) for text in texts]
        self.others += agreed.count(False)
        fast = iter(self._fast.encode([text for text, same in zip(texts, agreed, strict=True) if same]))
        others = iter(self._reference.encode([text for text, same in zip(texts, agreed, strict=True) if not same]))
        return [next(fast if same else others) for same in agreed]

    def _agreed(self, text: str) -> bool:
        assert self._known is not None
        if text.isascii():
            return self._ascii
        codes = np.frombuffer(text.encode("utf-32-le"), "<u4")
        found = self._known[codes]
        if not found.min():
            self._try(np.unique(codes[found == _UNKNOWN]))
            found = self._known[codes]
        return bool(found.max() == _SAME)

    def _try(self, codes: np.ndarray) -> None:
        assert self._known is not None
        texts = [_PROBE.format(chr(code)) for code in codes.tolist()]
        fast, reference = (engine.encode(texts) for engine in self._probes)
        same = [np.array_equal(ours, theirs) for ours, theirs in zip(fast, reference, strict=True)]
        self._known[codes] = np.where(same, _SAME, _OTHER)
        self._ascii = bool((self._known[:128] == _SAME).all())


def _probe_model(model: dict[str, Any]) -> dict[str, Any] | None:
    """A `tokenizer.json` with the same split that shows it; None when there is no table to differ in."""
    steps = _steps(model.get("pre_tokenizer"), "pretokenizers")
    normalizers = _steps(model.get("normalizer"), "normalizers")
    bpe: dict[str, Any] = model["model"]
    if bpe.get("type") == "BPE":
        if bpe.get("byte_fallback") and all(step.get("type") == "Metaspace" for step in steps):
            if all(
                step.get("type") in _TABLE_FREE and "String" in step.get("pattern", {"String": ""})
                for step in normalizers
            ):
                return None
        elif steps and steps[-1].get("type") == "ByteLevel":
            return {
                **model,
                "added_tokens": [],
                "post_processor": None,
                "truncation": None,
                "padding": None,
                "model": _byte_model(),
            }
    raise DataError("a tokenizer of this kind is only known to be encoded alike by tokenizers itself")


def _byte_model() -> dict[str, Any]:
    shown = _byte_letters()
    neighbours = [shown[ord(c)] for c in _NEIGHBOURS]
    merges = [(n, shown[lead]) for n in neighbours for lead in range(0xC2, 0xF5)]
    merges += [(shown[trail], n) for n in neighbours for trail in range(0x80, 0xC0)]
    merges += [(a, b) for a in neighbours for b in neighbours]
    tokens = [*shown, *("".join(pair) for pair in merges)]
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: i for i, token in enumerate(tokens)},
        "merges": [list(pair) for pair in merges],
    }


def _byte_letters() -> list[str]:
    """How byte-level tokenizers write each byte: printable ones of Latin-1 as they are, the others from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def _steps(part: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return part[name] if part.get("type") == "Sequence" else [part]
