"""Encoder of texts to the ids of a store: engine ids, BOS and EOS, counts of special strings.

The options determine BOS and EOS. The tokenizer's post-processor is never used, so nothing is added twice; a document
that has BOS or EOS already (given as ids, or a special string encoded as its id) gets no second one.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from lt_data.errors import DataError
from lt_data.store.megatron import UINT16_VOCAB_LIMIT
from lt_data.tokenizing.engine_selection import (
    CHECK_BYTES,
    EngineChoice,
    EngineRequest,
    HfEngine,
    TokenizerEngine,
    check_engine_name,
    choose_engine,
    make_engine,
)
from lt_data.tokenizing.parity import describe_difference, sample_text
from lt_data.tokenizing.text_splitter import TextSplitter
from lt_data.tokenizing.tokenizer import SpecialTokensAs, Tokenizer

_NO_IDS = np.zeros(0, np.uint32)


@dataclass(frozen=True, kw_only=True)
class EncodedBatch:
    """Batch of encoded documents.

    Attributes:
        tokens: concatenated ids of all documents, BOS and EOS included.
        lengths: ids of each document (int64); 0 for documents without a token, which get no BOS or EOS.
        special_strings: counts of literal special strings in the text.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    special_strings: Mapping[str, int]

    @property
    def n_empty(self) -> int:
        """Number of documents without a token."""
        return int(np.count_nonzero(self.lengths == 0))


class Encoder:
    """Encoder of batches.

    Args:
        tokenizer: the tokenizer.
        bos: begin each document with the BOS id.
        eos: end each document with the EOS id.
        engine: "hf", "gigatoken", "auto", or an earlier choice.
        special_tokens_as: encode special token strings as "text" or as special "ids".

    Attributes:
        check_bytes: bytes of text on which a faster engine is checked.
        dtype: dtype of the ids: uint16 if the vocabulary and Megatron's reader allow it.
        engine_choice: the selected engine; None before `select_engine`.

    Raises:
        DataError: BOS or EOS is requested and the tokenizer has none, ids exceed 31 bits, or an unknown engine.
    """

    check_bytes = CHECK_BYTES

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        bos: bool,
        eos: bool,
        engine: str | EngineChoice = "auto",
        special_tokens_as: SpecialTokensAs = "text",
    ) -> None:
        for name, requested, id_ in (("bos", bos, tokenizer.bos_id), ("eos", eos, tokenizer.eos_id)):
            if requested and id_ is None:
                raise DataError(
                    f"{name} = True: tokenizer {tokenizer.name or ''} has no {name}_token; add it to its "
                    f"tokenizer_config.json, or choose {name}=False (--no-{name})"
                )
        if tokenizer.vocab_size > 2**31:
            raise DataError(f"tokenizer {tokenizer.name}: ids up to {tokenizer.vocab_size - 1} exceed 31 bits")
        if special_tokens_as not in ("text", "ids"):
            raise DataError(f"special_tokens_as = {special_tokens_as!r}: choose 'text' or 'ids'")
        self.tokenizer = tokenizer
        self.bos = bos
        self.eos = eos
        self.special_tokens_as: SpecialTokensAs = special_tokens_as
        self.dtype: Literal["uint16", "uint32"] = "uint16" if tokenizer.vocab_size < UINT16_VOCAB_LIMIT else "uint32"
        self.requested_engine: EngineRequest = (
            engine.requested if isinstance(engine, EngineChoice) else check_engine_name(engine)
        )
        self.engine_choice = engine if isinstance(engine, EngineChoice) else None
        self._engine: TokenizerEngine | None = None
        self._prefix = np.array([tokenizer.bos_id] if bos else [], np.uint32)
        self._suffix = np.array([tokenizer.eos_id] if eos else [], np.uint32)
        self._special_strings = tokenizer.special_strings
        # Most text has none of them: search for their common prefix first.
        self._special_string_prefix = _common_prefix(self._special_strings)

    @cached_property
    def splitter(self) -> TextSplitter:
        """Splitter of documents that are too long to be encoded at once."""
        return TextSplitter(self.tokenizer.files, special_tokens_as=self.special_tokens_as)

    def select_engine(self, texts: Sequence[str]) -> EngineChoice:
        """Select the engine, unless it is selected already, by the ids of some of the user's texts.

        Raises:
            DataError: the requested engine cannot be used.
        """
        if self.engine_choice is None:
            self.engine_choice = choose_engine(
                self.tokenizer,
                requested=self.requested_engine,
                special_tokens_as=self.special_tokens_as,
                texts=texts,
                check_bytes=self.check_bytes,
            )
        return self.engine_choice

    def encode(self, texts: list[str]) -> EncodedBatch:
        """Encode documents.

        Raises:
            DataError: the fast engine returns other ids than the reference for a sample of them.
        """
        return self._join(self._encode_texts(texts), self._count_special_strings(texts))

    def encode_piece(self, text: str) -> tuple[np.ndarray, Mapping[str, int]]:
        """Return the ids of a piece of a document, without BOS and EOS, and its special strings."""
        return self._encode_texts([text])[0].astype(self._store_dtype, copy=False), self._count_special_strings([text])

    def join_pieces(self, pieces: Sequence[tuple[np.ndarray, Mapping[str, int]]]) -> EncodedBatch:
        """Join the encoded pieces of a document."""
        special_strings: Counter[str] = Counter()
        for _, counts in pieces:
            special_strings.update(counts)
        return self._join([np.concatenate([ids for ids, _ in pieces])], special_strings)

    def wrap_ids(self, documents: Sequence[np.ndarray]) -> EncodedBatch:
        """Add missing BOS and EOS to documents given as ids."""
        return self._join(documents, {})

    def check_ids(self, ids: Any, source: str) -> np.ndarray:
        """Return the ids of a document as uint32, after checking them.

        Raises:
            DataError: not a list of integers, or an id outside the vocabulary.
        """
        array = np.asarray(ids)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise DataError(
                f"{source}: ids of shape {array.shape} and type {array.dtype}; give a list of whole numbers"
            )
        if array.size and not 0 <= (low := int(array.min())) <= (high := int(array.max())) < self.tokenizer.vocab_size:
            bad = low if low < 0 else high
            position = int(np.flatnonzero(array == bad)[0])
            raise DataError(
                f"{source}: id {bad} at position {position} is not in the vocabulary of tokenizer "
                f"{self.tokenizer.name} (0 to {self.tokenizer.vocab_size - 1}); give the tokenizer that made these ids"
            )
        return array.astype(np.uint32, copy=False)

    @property
    def _store_dtype(self) -> np.dtype[Any]:
        return np.dtype(self.dtype).newbyteorder("<")

    def _encode_texts(self, texts: Sequence[str]) -> list[np.ndarray]:
        if self._engine is None:
            self._engine = make_engine(
                self.tokenizer, self.select_engine(texts).name, special_tokens_as=self.special_tokens_as
            )
        if not isinstance(self._engine, HfEngine) and texts:
            reference = HfEngine(self.tokenizer, special_tokens_as=self.special_tokens_as)
            if difference := describe_difference(self._engine, reference, [sample_text(texts)]):
                raise DataError(
                    f"gigatoken returns other ids than tokenizers for {difference}; "
                    "prepare again with engine='hf' (--engine hf)"
                )
        return self._engine.encode(texts)

    def _join(self, documents: Sequence[np.ndarray], special_strings: Mapping[str, int]) -> EncodedBatch:
        parts: list[np.ndarray] = []
        lengths: list[int] = []
        for ids in documents:
            if ids.size:
                before = self._prefix if not self.bos or ids[0] != self._prefix[0] else _NO_IDS
                after = self._suffix if not self.eos or ids[-1] != self._suffix[0] else _NO_IDS
                parts += (before, ids, after)
                lengths.append(before.size + ids.size + after.size)
            else:
                lengths.append(0)
        tokens = np.concatenate(parts) if parts else _NO_IDS
        assert not tokens.size or 0 <= int(tokens.min()) <= int(tokens.max()) < self.tokenizer.vocab_size
        return EncodedBatch(
            tokens=tokens.astype(self._store_dtype, copy=False),
            lengths=np.array(lengths, np.int64),
            special_strings=special_strings,
        )

    def _count_special_strings(self, texts: Sequence[str]) -> Mapping[str, int]:
        counts: Counter[str] = Counter()
        for text in texts:
            if self._special_strings and self._special_string_prefix in text:
                counts.update({string: n for string in self._special_strings if (n := text.count(string))})
        return counts


def _common_prefix(strings: Sequence[str]) -> str:
    first, last = min(strings, default=""), max(strings, default="")
    shared = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return first[:shared]
