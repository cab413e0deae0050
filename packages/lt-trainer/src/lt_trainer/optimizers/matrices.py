"""Exchange of slices for the whole matrices that a `MatrixTransform` needs; torch-free.

`OptimizerDriver` names the matrices and computes the slices of this rank; an engine that shards them brings slices
together (`MatrixExchange`). Where every rank has whole matrices there is nothing to exchange (`WholeMatrices`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class MatrixExchange(Protocol):
    """Slices of matrices to whole ones and back."""

    def transform(
        self, names: Sequence[str], direction: Callable[[str], Tensor], transform: Callable[[Tensor], Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield each name with this rank's slice of its transformed matrix, in any order.

        Args:
            names: the parameters, the same on all ranks that share them.
            direction: this rank's slice of a matrix; called once for each name.
            transform: function of a whole matrix; the result has its shape and dtype.
        """
        ...


class WholeMatrices:
    """`MatrixExchange` of ranks that have whole matrices."""

    def transform(
        self, names: Sequence[str], direction: Callable[[str], Tensor], transform: Callable[[Tensor], Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield each name with its transformed matrix."""
        for name in names:
            yield name, transform(direction(name))
