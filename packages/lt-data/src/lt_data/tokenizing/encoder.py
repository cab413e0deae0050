"""Encoder of texts to the ids of a store: engine ids, BOS and EOS, counts of special strings.

The options determine BOS and EOS. The tokenizer's post-processor is never used, so nothing is added twice; a document
that has BOS or EOS already (given as ids, or a special string encoded as its id) gets no second one.
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from lt_data.errors import DataError
from lt_data.store.megatron import UINT16_VOCAB_LIMIT
from lt_data.tokenizing.engine import make_engine
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


class Encoder:
    """Encoder of batches.

    Args:
        tokenizer: the tokenizer.
        bos: begin each document with the BOS id.
        eos: end each document with the EOS id.
        engine: "hf", "gigatoken" or "auto".
        special_tokens_as: encode special token strings as "text" or as special "ids".

    Attributes:
        dtype: dtype of the ids: uint16 if the vocabulary and Megatron's reader allow it.
        engine: name and version of the engine's package.

    Raises:
        DataError: BOS or EOS is requested and the tokenizer has none, ids exceed 31 bits, or an engine that is unknown
            or cannot be used.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        bos: bool,
        eos: bool,
        engine: str = "auto",
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
        self.dtype: Literal["uint16", "uint32"] = "uint16" if tokenizer.vocab_size < UINT16_VOCAB_LIMIT else "uint32"
        self._encode, self.engine = make_engine(tokenizer, engine, special_tokens_as)
        self._prefix = np.array([tokenizer.bos_id] if bos else [], np.uint32)
        self._suffix = np.array([tokenizer.eos_id] if eos else [], np.uint32)
        # Most text has none of the special strings: search for their common prefix first.
        self._special_string_prefix = os.path.commonprefix(tokenizer.special_strings)  # noqa: RUF071 - of strings

    def encode(self, texts: Sequence[str]) -> EncodedBatch:
        """Encode documents.

        Raises:
            DataError: the fast engine returns other ids than the reference, or the tokenizer fails on a text.
        """
        special_strings: Counter[str] = Counter()
        for text in texts:
            if self.tokenizer.special_strings and self._special_string_prefix in text:
                special_strings.update(
                    {string: n for string in self.tokenizer.special_strings if (n := text.count(string))}
                )
        return self._join(self._encode(texts), special_strings)

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

    def _join(self, documents: Sequence[np.ndarray], special_strings: Mapping[str, int]) -> EncodedBatch:
        parts: list[np.ndarray] = []
        lengths: list[int] = []
        for ids in documents:
            if ids.size:
                before = _NO_IDS if self._prefix.size and ids[0] == self._prefix[0] else self._prefix
                after = _NO_IDS if self._suffix.size and ids[-1] == self._suffix[0] else self._suffix
                parts += (before, ids, after)
                lengths.append(before.size + ids.size + after.size)
            else:
                lengths.append(0)
        tokens = np.concatenate(parts) if parts else _NO_IDS
        assert not tokens.size or int(tokens.max()) < self.tokenizer.vocab_size
        store_dtype = np.dtype(self.dtype).newbyteorder("<")
        return EncodedBatch(
            tokens=tokens.astype(store_dtype, copy=False),
            lengths=np.array(lengths, np.int64),
            special_strings=special_strings,
        )
