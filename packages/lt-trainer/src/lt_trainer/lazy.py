"""Lazy exports of a package (PEP 562): a submodule is loaded when one of its names is first used."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

__all__ = ["lazy_exports"]


def lazy_exports(
    package: str, names: Mapping[str, str]
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__all__`, `__getattr__` and `__dir__` of a package that exports names of its submodules.

    Args:
        package: `__name__` of the package.
        names: Exported names, separated by spaces, by submodule.
    """
    owners = {name: module for module, text in names.items() for name in text.split()}
    exported = sorted(owners)

    def get(name: str) -> Any:
        if name not in owners:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{owners[name]}"), name)

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *exported})

    return exported, get, list_names
