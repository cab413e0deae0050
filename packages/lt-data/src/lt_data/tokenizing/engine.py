"""What an engine is: a program that turns texts into ids."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Engine(Protocol):
    """Turns texts into ids."""

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """One uint32 array of ids per text."""
        ...
