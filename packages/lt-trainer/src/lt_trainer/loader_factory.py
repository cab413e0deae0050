"""The function that `data.loader = "module:function"` names, found and imported; `loading.py` calls it."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from lt_trainer.errors import RecipeError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["find_factory"]


def find_factory(loader: str) -> Callable[..., Any]:
    """The function that a recipe names; modules in the current folder are found too.

    Raises:
        RecipeError: there is no such module or function, or importing it fails.
    """
    module, _, name = loader.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    values = {"data.loader": loader}
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except ImportError as exc:
        remedy = "install the module, put its folder into PYTHONPATH, or start the run in its folder"
        raise RecipeError(f"cannot be imported: {exc}", values=values, remedy=remedy) from exc
    except AttributeError as exc:
        raise RecipeError(f"{exc}", values=values, remedy="write it as module:function") from exc
    if not callable(found):
        raise RecipeError("is not a function", values=values, remedy="write it as module:function")
    return found
