"""Texts to the ids of a store: the engine's ids, BOS and EOS, and the count of special strings.

The policy says what each document begins and ends with. The tokenizer's own post-processor is never used, so nothing is
added twice; a document that brings its BOS or EOS along (ids made elsewhere, or a special string that is wanted as its
id) keeps the one it has.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from lt_data.errors import DataError
from lt_data.store.megatron import UINT16_VOCAB_LIMIT
from lt_data.tokenizing.engines import (
    CHECK_BYTES,
    Asked,
    Engine,
    EngineChoice,
    HfEngine,
    check_asked,
    choose_engine,
    make_engine,
)
from lt_data.tokenizing.parity import difference, sample_of
from lt_data.tokenizing.pieces import Cutter
from lt_data.tokenizing.tokenizer import Specials, Tokenizer

_NOTHING = np.zeros(0, np.uint32)


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """A batch as ids.

    Attributes:
        tokens: the ids of all documents, one after the other, BOS and EOS included.
        lengths: tokens of each document (int64), 0 for documents without a token, which get no BOS or EOS either.
        special: literal special strings in the text, with their counts.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    special: Mapping[str, int]

    @property
    def empty(self) -> int:
        """Documents without a token."""
        return int(np.count_nonzero(self.lengths == 0))


class Encoder:
    """Encodes batches under a policy.

    Args:
        tokenizer: whose ids.
        bos: begin each document with the BOS id.
        eos: end each document with the EOS id.
        engine: "hf", "gigatoken", "auto", or a choice that was made before.
        specials: whether a special token's string in a text is text, or the special token ("ids").

    Attributes:
        check_bytes: how much text a faster engine is compared on before it is used.
        dtype: of the ids: uint16 when every id and Megatron's reader allow it.
        choice: the engine; None until it has been settled on the first text.

    Raises:
        DataError: BOS or EOS is asked for and the tokenizer has none, ids do not fit into 31 bits, or there is no such
            engine.
    """

    check_bytes = CHECK_BYTES

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        bos: bool,
        eos: bool,
        engine: str | EngineChoice = "auto",
        specials: Specials = "text",
    ) -> None:
        for name, wanted, id_ in (("bos", bos, tokenizer.bos_id), ("eos", eos, tokenizer.eos_id)):
            if wanted and id_ is None:
                raise DataError(
                    f"{name}=True, but tokenizer {tokenizer.name or ''} names no {name}_token: add it to its "
                    f"tokenizer_config.json, or choose {name}=False (--no-{name})"
                )
        if tokenizer.vocab_size > 2**31:
            raise DataError(f"tokenizer {tokenizer.name}: ids up to {tokenizer.vocab_size - 1} do not fit into 31 bits")
        if specials not in ("text", "ids"):
            raise DataError(f"specials={specials!r}: choose 'text' or 'ids'")
        self.tokenizer = tokenizer
        self.bos = bos
        self.eos = eos
        self.specials: Specials = specials
        self.dtype: Literal["uint16", "uint32"] = "uint16" if tokenizer.vocab_size < UINT16_VOCAB_LIMIT else "uint32"
        self.asked: Asked = engine.asked if isinstance(engine, EngineChoice) else check_asked(engine)
        self.choice = engine if isinstance(engine, EngineChoice) else None
        self._engine: Engine | None = None
        self._prefix = np.array([tokenizer.bos_id] if bos else [], np.uint32)
        self._suffix = np.array([tokenizer.eos_id] if eos else [], np.uint32)
        self._special = tokenizer.special_strings
        # Most text has none of them: one search for what they all begin with spares the others.
        self._special_prefix = _common_prefix(self._special)

    @cached_property
    def cutter(self) -> Cutter:
        """Cuts documents that are too long to be encoded at once."""
        return Cutter(self.tokenizer.files, specials=self.specials)

    def settle(self, texts: Sequence[str]) -> EngineChoice:
        """Choose the engine, unless that is done, by the ids of some of the user's own texts.

        Raises:
            DataError: the engine that was asked for cannot be used.
        """
        if self.choice is None:
            self.choice = choose_engine(
                self.tokenizer, asked=self.asked, specials=self.specials, texts=texts, check_bytes=self.check_bytes
            )
        return self.choice

    def encode(self, texts: list[str]) -> Encoded:
        """Encode some documents.

        Raises:
            DataError: a fast engine gives other ids than the reference for a piece of them.
        """
        return self._join(self._ids(texts), self._count_special(texts))

    def encode_piece(self, text: str) -> tuple[np.ndarray, Mapping[str, int]]:
        """The ids of a part of a document, in the dtype of the store, without BOS and EOS; and its special strings."""
        return self._ids([text])[0].astype(self._stored, copy=False), self._count_special([text])

    def join_pieces(self, pieces: Sequence[tuple[np.ndarray, Mapping[str, int]]]) -> Encoded:
        """The document whose pieces were encoded."""
        special: Counter[str] = Counter()
        for _, counts in pieces:
            special.update(counts)
        return self._join([np.concatenate([ids for ids, _ in pieces])], special)

    def pass_through(self, documents: Sequence[np.ndarray]) -> Encoded:
        """Take documents that are ids of this tokenizer already; what they begin or end with is not added again."""
        return self._join(documents, {})

    def check_ids(self, ids: Any, source: str) -> np.ndarray:
        """The ids of a document as an array, if they are ids of this tokenizer.

        Raises:
            DataError: not a run of whole numbers, or one of them is outside of the vocabulary.
        """
        array = np.asarray(ids)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise DataError(
                f"{source}: ids of shape {array.shape} and type {array.dtype}: a list of whole numbers needed"
            )
        if array.size and not 0 <= (low := int(array.min())) <= (high := int(array.max())) < self.tokenizer.vocab_size:
            bad = low if low < 0 else high
            where = int(np.flatnonzero(array == bad)[0])
            raise DataError(
                f"{source}: id {bad} at position {where} is not in the vocabulary of tokenizer {self.tokenizer.name} "
                f"(0 to {self.tokenizer.vocab_size - 1}): name the tokenizer that made these ids"
            )
        return array.astype(np.uint32, copy=False)

    @property
    def _stored(self) -> np.dtype[Any]:
        return np.dtype(self.dtype).newbyteorder("<")

    def _ids(self, texts: Sequence[str]) -> list[np.ndarray]:
        if self._engine is None:
            self._engine = make_engine(self.tokenizer, self.settle(texts).name, specials=self.specials)
        if not isinstance(self._engine, HfEngine) and texts:
            reference = HfEngine(self.tokenizer, specials=self.specials)
            if found := difference(self._engine, reference, [sample_of(texts)]):
                raise DataError(
                    f"gigatoken gives other ids than tokenizers for {found}; "
                    "prepare again with engine='hf' (--engine hf)"
                )
        return self._engine.encode(texts)

    def _join(self, documents: Sequence[np.ndarray], special: Mapping[str, int]) -> Encoded:
        parts: list[np.ndarray] = []
        lengths: list[int] = []
        for ids in documents:
            if ids.size:
                before = self._prefix if not self.bos or ids[0] != self._prefix[0] else _NOTHING
                after = self._suffix if not self.eos or ids[-1] != self._suffix[0] else _NOTHING
                parts += (before, ids, after)
                lengths.append(before.size + ids.size + after.size)
            else:
                lengths.append(0)
        tokens = np.concatenate(parts) if parts else _NOTHING
        assert not tokens.size or 0 <= int(tokens.min()) <= int(tokens.max()) < self.tokenizer.vocab_size
        return Encoded(
            tokens=tokens.astype(self._stored, copy=False), lengths=np.array(lengths, np.int64), special=special
        )

    def _count_special(self, texts: Sequence[str]) -> Mapping[str, int]:
        counts: Counter[str] = Counter()
        for text in texts:
            if self._special and self._special_prefix in text:
                counts.update({string: n for string in self._special if (n := text.count(string))})
        return counts


def _common_prefix(strings: Sequence[str]) -> str:
    first, last = min(strings, default=""), max(strings, default="")
    shared = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return first[:shared]
