"""Engines that encode texts: `tokenizers`, the reference, or gigatoken, several times faster.

`auto` takes gigatoken if it is installed and reads the tokenizer. Its ids are compared with those of `tokenizers`: for
the first 256 KiB of text that an engine gets, so of every unit of a job, and for 2,000 characters of each later batch.
A difference is an error. Cost: 0.1 s per engine, and 1 % of the time.

Gigatoken caches every word without a bound, so its tokenizer is loaded again when the process has grown by 96 MiB.
Only this file imports `gigatoken`.
"""

import json
import resource
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from lt_data.errors import DataError
from lt_data.tokenizing.tokenizer import SpecialTokensAs, Tokenizer

EngineRequest = Literal["auto", "hf", "gigatoken"]
Encode = Callable[[Sequence[str]], list[np.ndarray]]
"""Function from texts to one uint32 array of ids per text."""

_PROBE = "Don't stop: it's 1234567  x\t\n\n é\u0301 東京 \U0001f98a <|eos|> </s>def f(x):\r\n    return x**2"
_FIRST_CHARACTERS = 1 << 18
_SAMPLE_CHARACTERS = 2000
_GROWTH_BYTES = 96 << 20
_STATM = Path("/proc/self/statm")


def make_engine(
    tokenizer: Tokenizer, requested: str, special_tokens_as: SpecialTokensAs
) -> tuple[Encode, dict[str, str]]:
    """Return the function that encodes, and the name and version of the engine.

    Raises:
        DataError: an unknown engine; or gigatoken is requested and not installed, or cannot read the tokenizer.
    """
    if requested not in get_args(EngineRequest):
        raise DataError(f"engine = {requested!r}: choose {', '.join(map(repr, get_args(EngineRequest)))}")
    if requested != "hf":
        try:
            return GigatokenEngine(tokenizer, special_tokens_as).encode, {
                "name": "gigatoken",
                "version": version("gigatoken"),
            }
        except DataError:
            if requested == "gigatoken":
                raise

    def encode(texts: Sequence[str]) -> list[np.ndarray]:
        return tokenizer.encode_batch(texts, special_tokens_as=special_tokens_as)

    return encode, {"name": "hf", "version": version("tokenizers")}


class GigatokenEngine:
    """Engine of `gigatoken`, compared with `tokenizers`.

    Raises:
        DataError: gigatoken is not installed, or cannot read this tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer, special_tokens_as: SpecialTokensAs) -> None:
        try:
            from gigatoken import gigatoken_rs
        except ImportError as exc:
            raise DataError(f'engine = "gigatoken": not installed ({exc}): pip install "lt-data[fast]"') from exc
        self._load_json: Any = gigatoken_rs.load_hf_json
        model: dict[str, Any] = json.loads(tokenizer.definition)
        model["truncation"] = model["padding"] = None  # supported by neither gigatoken nor this package
        if special_tokens_as == "text":
            model["added_tokens"] = [token for token in model.get("added_tokens") or [] if not token.get("special")]
        self._model = json.dumps(model)
        self._tokenizer = tokenizer
        self._special_tokens_as: SpecialTokensAs = special_tokens_as
        self._unchecked = _FIRST_CHARACTERS  # characters still to be compared as a whole
        self._load()
        if not np.array_equal(self._encode([_PROBE])[0], tokenizer.encode(_PROBE, special_tokens_as=special_tokens_as)):
            raise DataError('engine = "gigatoken": cannot read this tokenizer (other ids than those of tokenizers)')

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return one uint32 array of ids per text.

        Raises:
            DataError: the ids of a text that was compared differ from those of `tokenizers`.
        """
        ids = self._encode(texts)
        n = 0
        while n < len(texts) and self._unchecked > 0 and len(texts[n]) <= _FIRST_CHARACTERS:
            self._unchecked -= len(texts[n]) + 1
            n += 1
        self._compare(texts[:n], ids[:n])
        if n < len(texts):
            text = texts[n + (len(texts) - n) // 2]
            sample = [text[len(text) // 2 :][:_SAMPLE_CHARACTERS]]
            self._compare(sample, self._encode(sample))
        if _memory_bytes() > self._reload_at_bytes:
            self._load()
        return ids

    def _encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        # each array is a view of gigatoken's memory
        return [np.asarray(self._gigatoken.encode(text), np.uint32) for text in texts]

    def _compare(self, texts: Sequence[str], ids: Sequence[np.ndarray]) -> None:
        expected = self._tokenizer.encode_batch(texts, special_tokens_as=self._special_tokens_as)
        for text, found, right in zip(texts, ids, expected, strict=True):
            if not np.array_equal(found, right):
                raise DataError(
                    f"gigatoken returns other ids than tokenizers for the text {text[:60]!r}...; prepare again with "
                    "engine='hf' (--engine hf)"
                )

    def _load(self) -> None:
        self._gigatoken: Any = None  # free the old one first
        try:
            self._gigatoken = self._load_json(self._model)
        except Exception as exc:  # gigatoken raises RuntimeError, ValueError, TypeError and others
            reason = str(exc).partition("\n")[0][:200]
            raise DataError(f'engine = "gigatoken": cannot read this tokenizer ({reason})') from exc
        self._reload_at_bytes = _memory_bytes() + _GROWTH_BYTES


def _memory_bytes() -> int:
    """Return the memory of this process: current if the system reports it, else its peak."""
    try:
        return int(_STATM.read_bytes().split()[1]) * resource.getpagesize()
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
