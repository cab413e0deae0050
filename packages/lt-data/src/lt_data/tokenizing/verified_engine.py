r"""Fast engine for texts that it provably splits as the reference does, with fallback to the reference.

Two programs that split by the same regex can differ in their Unicode tables: a code point that is a letter in the newer
one is unassigned in the older one. So each code point is probed once in both engines before the fast one gets a text
with it: with the tokenizer's own normalizer and split, among letters, digits, punctuation, spaces and line ends, under
a byte-level model that merges a neighbor with the first or last byte of another character, so that the ids reveal which
characters are in one word. A text with a code point on which the two differ is encoded by the reference.

Tokenizers without a split (SentencePiece style) use no Unicode table and need no probes. Cost: 0.1 ms per distinct code
point, and 3 ms per MB of text that is not ASCII.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lt_data.errors import DataError
from lt_data.tokenizing.files import MODEL_FILE
from lt_data.tokenizing.tokenizer import Tokenizer

if TYPE_CHECKING:
    from lt_data.tokenizing.engine import TokenizerEngine

_UNKNOWN, _EQUAL, _DIFFERENT = 0, 1, 2
_NEIGHBORS = "aA!1' \n"
_PROBE = "a{0}a A{0}A a{0}A !{0}! 1{0}1 {0} {0}\n{0}\n '{0}e '{0} e{0}\u0323\u0301 {0}{0}{0}"
_NORMALIZERS_WITHOUT_UNICODE_TABLE = ("Prepend", "Replace")


class VerifiedEngine:
    """Fast engine with fallback to the reference where the two may differ.

    Args:
        tokenizer: the tokenizer.
        fast: the fast engine.
        reference: the reference engine.
        make_fast: function from the files of a tokenizer to a fast engine.
        make_reference: function from the files of a tokenizer to a reference engine.

    Attributes:
        n_fallback_texts: texts that the reference has encoded.

    Raises:
        DataError: an unsupported kind of tokenizer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        fast: "TokenizerEngine",
        reference: "TokenizerEngine",
        make_fast: Callable[[Mapping[str, bytes]], "TokenizerEngine"],
        make_reference: Callable[[Mapping[str, bytes]], "TokenizerEngine"],
    ) -> None:
        self.n_fallback_texts = 0
        self._fast = fast
        self._reference = reference
        self._code_point_status: np.ndarray | None = None
        probe = _probe_model(json.loads(tokenizer.files[MODEL_FILE]))
        if probe is not None:
            files = {MODEL_FILE: json.dumps(probe).encode()}
            self._probes = (make_fast(files), make_reference(files))
            self._code_point_status = np.zeros(0x110000, np.uint8)
            self._probe_code_points(np.arange(128))

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return one uint32 array of ids per text."""
        if self._code_point_status is None:
            return self._fast.encode(texts)
        verified = [self._is_verified(text) for text in texts]
        self.n_fallback_texts += verified.count(False)
        fast = iter(self._fast.encode([text for text, is_fast in zip(texts, verified, strict=True) if is_fast]))
        rest = iter(
            self._reference.encode([text for text, is_fast in zip(texts, verified, strict=True) if not is_fast])
        )
        return [next(fast if is_fast else rest) for is_fast in verified]

    def _is_verified(self, text: str) -> bool:
        assert self._code_point_status is not None
        if text.isascii():
            return self._is_ascii_verified
        codes = np.frombuffer(text.encode("utf-32-le"), "<u4")
        status = self._code_point_status[codes]
        if not status.min():
            self._probe_code_points(np.unique(codes[status == _UNKNOWN]))
            status = self._code_point_status[codes]
        return bool(status.max() == _EQUAL)

    def _probe_code_points(self, codes: np.ndarray) -> None:
        assert self._code_point_status is not None
        texts = [_PROBE.format(chr(code)) for code in codes.tolist()]
        fast, reference = (engine.encode(texts) for engine in self._probes)
        equal = [np.array_equal(a, b) for a, b in zip(fast, reference, strict=True)]
        self._code_point_status[codes] = np.where(equal, _EQUAL, _DIFFERENT)
        self._is_ascii_verified = bool((self._code_point_status[:128] == _EQUAL).all())


def _probe_model(model: dict[str, Any]) -> dict[str, Any] | None:
    """Return a `tokenizer.json` that reveals the split in its ids; None if it uses no Unicode table."""
    steps = _sequence_steps(model.get("pre_tokenizer"), "pretokenizers")
    normalizers = _sequence_steps(model.get("normalizer"), "normalizers")
    bpe: dict[str, Any] = model["model"]
    if bpe.get("type") == "BPE":
        if bpe.get("byte_fallback") and all(step.get("type") == "Metaspace" for step in steps):
            if all(
                step.get("type") in _NORMALIZERS_WITHOUT_UNICODE_TABLE
                and "String" in step.get("pattern", {"String": ""})
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
    raise DataError("this kind of tokenizer is supported only by tokenizers itself")


def _byte_model() -> dict[str, Any]:
    byte_tokens = _bytes_to_unicode()
    neighbors = [byte_tokens[ord(c)] for c in _NEIGHBORS]
    merges = [(n, byte_tokens[lead]) for n in neighbors for lead in range(0xC2, 0xF5)]
    merges += [(byte_tokens[trail], n) for n in neighbors for trail in range(0x80, 0xC0)]
    merges += [(a, b) for a in neighbors for b in neighbors]
    tokens = [*byte_tokens, *("".join(pair) for pair in merges)]
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


def _bytes_to_unicode() -> list[str]:
    """Return the character of each byte in byte-level BPE: printable Latin-1, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _sequence_steps(part: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return part[name] if part.get("type") == "Sequence" else [part]
