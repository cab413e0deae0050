"""Interface of tokenizer engines."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class TokenizerEngine(Protocol):
    """Encoder of texts to ids."""

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return one uint32 array of ids per text."""
        ...
