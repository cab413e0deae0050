"""The `lt` command line. Importing this package loads no command."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lt_launch.__main__ import main
    from lt_launch.catalog import installed_commands, installed_packages

__all__ = ["installed_commands", "installed_packages", "main"]

_EXPORTS = {
    "installed_commands": "lt_launch.catalog",
    "installed_packages": "lt_launch.catalog",
    "main": "lt_launch.__main__",
}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
