"""Which program turns text into ids: `tokenizers`, the reference, or a faster one that has shown the same ids.

`auto` takes gigatoken when it is installed, reads the tokenizer, and gives the ids of `tokenizers` for the first
megabytes of the user's own text and for a collection of difficult strings (lt_data.tokenizing.parity). Else, and for
a text that is smaller than the check, it takes `tokenizers`, and the choice says why. Asked for by name, gigatoken
has to pass the same check. Texts with code points that the two split differently go to `tokenizers` all the same
(lt_data.tokenizing.agreement), and a sample of every batch is compared again. Cost of the check: that of `tokenizers`
for `CHECK_BYTES`, about a second, once per job.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, cast, get_args

import numpy as np

from lt_data.errors import DataError
from lt_data.tokenizing.agreement import AgreedEngine
from lt_data.tokenizing.engine import Engine
from lt_data.tokenizing.gigatoken_engine import GigatokenEngine
from lt_data.tokenizing.parity import difference, difficult_texts
from lt_data.tokenizing.tokenizer import Specials, Tokenizer

EngineName = Literal["hf", "gigatoken"]
Asked = Literal["auto", "hf", "gigatoken"]
__all__ = ["CHECK_BYTES", "Asked", "Engine", "EngineChoice", "EngineName", "choose_engine", "make_engine"]

CHECK_BYTES = 2 << 20
_PIECE_CHARACTERS = 1 << 17  # of a text at once; the reference needs some hundred bytes of memory for each
_CALL_CHARACTERS = 1 << 19  # that `tokenizers` is given at once, for the same reason
_PACKAGES: dict[EngineName, str] = {"hf": "tokenizers", "gigatoken": "gigatoken"}


@dataclass(frozen=True, kw_only=True)
class EngineChoice:
    """Which engine makes the ids of a store, and why. It goes into the manifest.

    Attributes:
        name: "hf" or "gigatoken".
        version: of its package.
        asked: what the user asked for.
        why: one sentence.
        checked_bytes: UTF-8 bytes of the user's text whose ids both engines agreed on; 0 without a check.
    """

    name: EngineName
    version: str
    asked: Asked
    why: str
    checked_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """The choice as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "EngineChoice":
        """Read what `to_json` gave.

        Raises:
            DataError: a field is missing, unknown, or names no engine.
        """
        try:
            choice = cls(**values)
        except TypeError as exc:
            raise DataError(f"engine {values!r}: not the description of an engine ({exc})") from exc
        if choice.name not in get_args(EngineName):
            raise DataError(f"engine {choice.name!r}: this program knows {', '.join(get_args(EngineName))}")
        return choice


class HfEngine:
    """Encodes with `tokenizers`."""

    def __init__(self, tokenizer: Tokenizer, *, specials: Specials) -> None:
        self._tokenizer = tokenizer
        self._specials: Specials = specials

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """One uint32 array of ids per text."""
        ids: list[np.ndarray] = []
        begin = characters = 0
        for end, text in enumerate(texts, start=1):
            characters += len(text)
            if characters >= _CALL_CHARACTERS or end == len(texts):
                ids += self._tokenizer.encode_batch(texts[begin:end], specials=self._specials)
                begin, characters = end, 0
        return ids


def check_asked(engine: str) -> Asked:
    """The name of an engine, or a `DataError`."""
    if engine not in get_args(Asked):
        raise DataError(f"engine={engine!r}: choose {', '.join(map(repr, get_args(Asked)))}")
    return cast(Asked, engine)


def choose_engine(
    tokenizer: Tokenizer, *, asked: Asked, specials: Specials, texts: Sequence[str], check_bytes: int = CHECK_BYTES
) -> EngineChoice:
    """Choose an engine.

    Args:
        tokenizer: whose ids are wanted.
        asked: "hf" takes `tokenizers` without more ado; "gigatoken" takes that or fails; "auto" decides.
        specials: what a special token's string in a text is.
        texts: the user's own text to compare the engines on.
        check_bytes: how much of it is compared. "auto" takes `tokenizers` when there is less: the check would cost
            more than it saves.

    Raises:
        DataError: gigatoken is asked for and not installed, cannot read the tokenizer, or gives other ids.
    """
    if asked == "hf":
        return _choice("hf", asked, "asked for")
    sample = _within(texts, check_bytes)
    size = sum(len(text.encode()) for text in sample)
    if asked == "auto" and size < check_bytes:
        return _choice("hf", asked, f"less than {check_bytes} bytes of text, for which a faster engine saves nothing")
    try:
        fast = make_engine(tokenizer, "gigatoken", specials=specials)
        reference = HfEngine(tokenizer, specials=specials)
        for what, compared in (("difficult text", difficult_texts(tokenizer)), ("the text given", sample)):
            if found := difference(fast, reference, compared):
                raise DataError(f"gigatoken gives other ids than tokenizers for {what}: {found}")
    except DataError as exc:
        if asked == "gigatoken":
            raise DataError(f"engine='gigatoken': {exc}; or choose engine='auto' or 'hf' (--engine)") from exc
        return _choice("hf", asked, str(exc))
    why = "gives the ids of tokenizers for the first of the text and for difficult text"
    return _choice("gigatoken", asked, why, checked_bytes=size)


def make_engine(tokenizer: Tokenizer, name: EngineName, *, specials: Specials) -> Engine:
    """The engine of that name.

    Raises:
        DataError: it is not installed, or cannot read the tokenizer.
    """
    if name == "hf":
        return HfEngine(tokenizer, specials=specials)
    return AgreedEngine(
        tokenizer,
        fast=GigatokenEngine(tokenizer.files, specials=specials),
        reference=HfEngine(tokenizer, specials=specials),
        make_fast=lambda files: GigatokenEngine(files, specials=specials),
        make_reference=lambda files: HfEngine(Tokenizer.from_bytes(files), specials=specials),
    )


def _choice(name: EngineName, asked: Asked, why: str, **checked: int) -> EngineChoice:
    try:
        installed = version(_PACKAGES[name])
    except PackageNotFoundError:  # a copy on the path without its metadata
        installed = "unknown"
    return EngineChoice(name=name, version=installed, asked=asked, why=why, **checked)


def _within(texts: Sequence[str], most_bytes: int) -> list[str]:
    """The first texts, up to about that many bytes, those that are long in pieces."""
    kept: list[str] = []
    for text in texts:
        for begin in range(0, max(len(text), 1), _PIECE_CHARACTERS):
            if most_bytes <= 0:
                return kept
            kept.append(text[begin : begin + _PIECE_CHARACTERS])
            most_bytes -= len(kept[-1].encode())
    return kept
