"""Exchange of a module's class, by which parallelism and float8 change what a module computes.

Several mechanisms may want the same module: tensor parallelism and float8 a product, tensor parallelism and balancing a
router. The second must do what the first does, too, so its class must derive from the one that the module has by then.
"""

from __future__ import annotations

from torch import nn


def exchange_class(module: nn.Module, new_class: type[nn.Module]) -> None:
    """Give a module a class that derives from its present one, so that nothing it does is lost."""
    present = type(module)
    composes = f"{new_class.__name__} would drop what {present.__name__} does: derive a class from both"
    assert issubclass(new_class, present), composes
    module.__class__ = new_class
