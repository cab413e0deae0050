"""The engine of `gigatoken`: byte-level BPE, and SentencePiece-style BPE, many times faster than `tokenizers`.

Special strings in a text are text here too: the tokenizer is loaded without its special tokens (as those would be
found), except where they are wanted as ids. Gigatoken remembers each word that it has met, without a bound; so the
tokenizer is loaded again when the process has grown by `_GROWTH_BYTES`, which costs some 0.1 s. Whether the ids are
those of `tokenizers` is another module's question (lt_data.tokenizing.parity).

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
from lt_data.tokenizing.tokenizer import Specials

_GROWTH_BYTES = 96 << 20
_STATM = Path("/proc/self/statm")


class GigatokenEngine:
    """Encodes with `gigatoken`.

    Args:
        files: of the tokenizer.
        specials: what a special token's string in a text is.

    Raises:
        DataError: gigatoken is not installed, or cannot read this tokenizer; the message says which.
    """

    def __init__(self, files: Mapping[str, bytes], *, specials: Specials) -> None:
        try:
            from gigatoken import gigatoken_rs
        except ImportError as exc:
            raise DataError(f'gigatoken is not installed ({exc}): pip install "lt-data[fast]"') from exc
        self._load_json: Any = gigatoken_rs.load_hf_json
        self._model = _model(files[MODEL_FILE], specials)
        self._load()

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """One uint32 array of ids per text."""
        # Each array is a view into memory of gigatoken's own.
        ids = [np.asarray(self._backend.encode(text), np.uint32) for text in texts]
        if _memory_bytes() > self._most_bytes:
            self._load()
        return ids

    def _load(self) -> None:
        self._backend: Any = None  # the old one goes first
        try:
            self._backend = self._load_json(self._model)
        except Exception as exc:  # gigatoken raises ValueError, TypeError and others for what it cannot read
            raise DataError(f"gigatoken cannot read this tokenizer ({_first_line(exc)})") from exc
        self._most_bytes = _memory_bytes() + _GROWTH_BYTES


def _model(content: bytes, specials: Specials) -> str:
    model: dict[str, Any] = json.loads(content)
    # Gigatoken knows neither, and this package uses neither.
    model["truncation"] = model["padding"] = None
    if specials == "text":
        model["added_tokens"] = [token for token in model.get("added_tokens") or [] if not token.get("special")]
    return json.dumps(model)


def _memory_bytes() -> int:
    """Memory of this process: now where the system tells, else the most that it had."""
    try:
        return int(_STATM.read_bytes().split()[1]) * resource.getpagesize()
    except OSError:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024


def _first_line(exc: Exception) -> str:
    text = str(exc).partition("\n")[0]
    return text[:200] or type(exc).__name__
