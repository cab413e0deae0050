"""Engine selection: `tokenizers`, the reference, or a faster engine with verified equal ids.

`auto` selects gigatoken if it is installed, can read the tokenizer, and returns the ids of `tokenizers` for the first
megabytes of the user's text and for a collection of difficult strings (lt_data.tokenizing.parity). Otherwise, and for a
text that is smaller than the check, it selects `tokenizers` and records the reason. gigatoken must pass the same check
if it is requested by name. Texts with code points that the two split differently are encoded by `tokenizers`
(lt_data.tokenizing.verified_engine), and a sample of every batch is compared again. Cost of the check: encoding
`CHECK_BYTES` with `tokenizers`, about a second, once per job.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, cast, get_args

import numpy as np

from lt_data.errors import DataError
from lt_data.tokenizing.engine import TokenizerEngine
from lt_data.tokenizing.gigatoken_engine import GigatokenEngine
from lt_data.tokenizing.parity import describe_difference, difficult_texts
from lt_data.tokenizing.tokenizer import SpecialTokensAs, Tokenizer
from lt_data.tokenizing.verified_engine import VerifiedEngine

EngineName = Literal["hf", "gigatoken"]
EngineRequest = Literal["auto", "hf", "gigatoken"]
__all__ = [
    "CHECK_BYTES",
    "EngineChoice",
    "EngineName",
    "EngineRequest",
    "TokenizerEngine",
    "choose_engine",
    "make_engine",
]

CHECK_BYTES = 2 << 20
_PIECE_CHARACTERS = 1 << 17  # of a text per call; the reference needs some hundred bytes of memory for each
_CALL_CHARACTERS = 1 << 19  # per call of `tokenizers`, for the same reason
_PACKAGES: dict[EngineName, str] = {"hf": "tokenizers", "gigatoken": "gigatoken"}


@dataclass(frozen=True, kw_only=True)
class EngineChoice:
    """Selected engine of a store and the reason, recorded in the manifest.

    Attributes:
        name: "hf" or "gigatoken".
        version: version of its package.
        requested: the engine that the user requested.
        reason: reason of the selection.
        checked_bytes: UTF-8 bytes of the user's text with equal ids of both engines; 0 without a check.
    """

    name: EngineName
    version: str
    requested: EngineRequest
    reason: str
    checked_bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the choice as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "EngineChoice":
        """Restore a choice from the values of `to_dict`.

        Raises:
            DataError: a field is missing or unknown, or the engine is unknown.
        """
        try:
            choice = cls(**values)
        except TypeError as exc:
            raise DataError(f"engine {values!r}: not an engine choice ({exc})") from exc
        if choice.name not in get_args(EngineName):
            raise DataError(f"engine {choice.name!r}: choose one of {', '.join(get_args(EngineName))}")
        return choice


class HfEngine:
    """Engine of `tokenizers`, the reference."""

    def __init__(self, tokenizer: Tokenizer, *, special_tokens_as: SpecialTokensAs) -> None:
        self._tokenizer = tokenizer
        self._special_tokens_as: SpecialTokensAs = special_tokens_as

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return one uint32 array of ids per text."""
        ids: list[np.ndarray] = []
        begin = characters = 0
        for end, text in enumerate(texts, start=1):
            characters += len(text)
            if characters >= _CALL_CHARACTERS or end == len(texts):
                ids += self._tokenizer.encode_batch(texts[begin:end], special_tokens_as=self._special_tokens_as)
                begin, characters = end, 0
        return ids


def check_engine_name(engine: str) -> EngineRequest:
    """Return the name of an engine; raise DataError if it is unknown."""
    if engine not in get_args(EngineRequest):
        raise DataError(f"engine = {engine!r}: choose {', '.join(map(repr, get_args(EngineRequest)))}")
    return cast(EngineRequest, engine)


def choose_engine(
    tokenizer: Tokenizer,
    *,
    requested: EngineRequest,
    special_tokens_as: SpecialTokensAs,
    texts: Sequence[str],
    check_bytes: int = CHECK_BYTES,
) -> EngineChoice:
    """Choose an engine.

    Args:
        tokenizer: the tokenizer.
        requested: "hf" selects `tokenizers` without a check; "gigatoken" selects that or raises; "auto" decides.
        special_tokens_as: encode special token strings as "text" or as special "ids".
        texts: the user's text to compare the engines on.
        check_bytes: bytes to compare. "auto" selects `tokenizers` for less text: the check would cost more than it
            saves.

    Raises:
        DataError: gigatoken is requested and not installed, cannot read the tokenizer, or returns other ids.
    """
    if requested == "hf":
        return _make_choice("hf", requested, "requested")
    sample = _take_bytes(texts, check_bytes)
    size = sum(len(text.encode()) for text in sample)
    if requested == "auto" and size < check_bytes:
        return _make_choice("hf", requested, f"less than {check_bytes} bytes of text, too few for a check")
    try:
        fast = make_engine(tokenizer, "gigatoken", special_tokens_as=special_tokens_as)
        reference = HfEngine(tokenizer, special_tokens_as=special_tokens_as)
        for label, compared in (("difficult text", difficult_texts(tokenizer)), ("the given text", sample)):
            if difference := describe_difference(fast, reference, compared):
                raise DataError(f"gigatoken returns other ids than tokenizers for {label}: {difference}")
    except DataError as exc:
        if requested == "gigatoken":
            raise DataError(f"engine = 'gigatoken': {exc}; or choose engine='auto' or 'hf' (--engine)") from exc
        return _make_choice("hf", requested, str(exc))
    reason = "equal ids to tokenizers for the beginning of the text and for difficult text"
    return _make_choice("gigatoken", requested, reason, checked_bytes=size)


def make_engine(tokenizer: Tokenizer, name: EngineName, *, special_tokens_as: SpecialTokensAs) -> TokenizerEngine:
    """Return the engine of that name.

    Raises:
        DataError: it is not installed, or cannot read the tokenizer.
    """
    if name == "hf":
        return HfEngine(tokenizer, special_tokens_as=special_tokens_as)
    return VerifiedEngine(
        tokenizer,
        fast=GigatokenEngine(tokenizer.files, special_tokens_as=special_tokens_as),
        reference=HfEngine(tokenizer, special_tokens_as=special_tokens_as),
        make_fast=lambda files: GigatokenEngine(files, special_tokens_as=special_tokens_as),
        make_reference=lambda files: HfEngine(Tokenizer.from_bytes(files), special_tokens_as=special_tokens_as),
    )


def _make_choice(name: EngineName, requested: EngineRequest, reason: str, **checked: int) -> EngineChoice:
    try:
        installed = version(_PACKAGES[name])
    except PackageNotFoundError:  # importable without package metadata
        installed = "unknown"
    return EngineChoice(name=name, version=installed, requested=requested, reason=reason, **checked)


def _take_bytes(texts: Sequence[str], max_bytes: int) -> list[str]:
    """Return the first texts, up to about that many bytes, long ones in pieces."""
    pieces: list[str] = []
    for text in texts:
        for begin in range(0, max(len(text), 1), _PIECE_CHARACTERS):
            if max_bytes <= 0:
                return pieces
            pieces.append(text[begin : begin + _PIECE_CHARACTERS])
            max_bytes -= len(pieces[-1].encode())
    return pieces
