"""Engine of `gigatoken`: byte-level and SentencePiece-style BPE, many times faster than `tokenizers`.

The tokenizer is loaded without its special tokens, so that special strings are encoded as text, except if they are
requested as ids. Gigatoken caches every word without a bound, so the tokenizer is reloaded when the process has grown
by `_GROWTH_BYTES`, which costs some 0.1 s. Equality with `tokenizers` is checked elsewhere (lt_data.tokenizing.parity).

Only this file imports `gigatoken`.
"""

import json
import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lt_data.errors import DataError
from lt_data.tokenizing.files import MODEL_FILE
from lt_data.tokenizing.tokenizer import SpecialTokensAs

_GROWTH_BYTES = 96 << 20
_STATM = Path("/proc/self/statm")


class GigatokenEngine:
    """Engine of `gigatoken`.

    Args:
        files: files of the tokenizer.
        special_tokens_as: encode special token strings as "text" or as special "ids".

    Raises:
        DataError: gigatoken is not installed, or cannot read this tokenizer.
    """

    def __init__(self, files: Mapping[str, bytes], *, special_tokens_as: SpecialTokensAs) -> None:
        try:
            from gigatoken import gigatoken_rs
        except ImportError as exc:
            raise DataError(f'gigatoken is not installed ({exc}): pip install "lt-data[fast]"') from exc
        self._load_json: Any = gigatoken_rs.load_hf_json
        self._model = _convert_model(files[MODEL_FILE], special_tokens_as)
        self._load()

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return one uint32 array of ids per text."""
        # each array is a view of gigatoken's memory
        ids = [np.asarray(self._tokenizer.encode(text), np.uint32) for text in texts]
        if _memory_bytes() > self._reload_at_bytes:
            self._load()
        return ids

    def _load(self) -> None:
        self._tokenizer: Any = None  # free the old one first
        try:
            self._tokenizer = self._load_json(self._model)
        except Exception as exc:  # gigatoken raises ValueError, TypeError and others
            raise DataError(f"gigatoken cannot read this tokenizer ({_first_line(exc)})") from exc
        self._reload_at_bytes = _memory_bytes() + _GROWTH_BYTES


def _convert_model(content: bytes, special_tokens_as: SpecialTokensAs) -> str:
    model: dict[str, Any] = json.loads(content)
    # supported by neither gigatoken nor this package
    model["truncation"] = model["padding"] = None
    if special_tokens_as == "text":
        model["added_tokens"] = [token for token in model.get("added_tokens") or [] if not token.get("special")]
    return json.dumps(model)


def _memory_bytes() -> int:
    """Return the memory of this process: current if the system reports it, else its peak."""
    try:
        return int(_STATM.read_bytes().split()[1]) * resource.getpagesize()
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def _first_line(exc: Exception) -> str:
    text = str(exc).partition("\n")[0]
    return text[:200] or type(exc).__name__
