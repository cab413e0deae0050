"""Import of the custom loader function that `data.loader = "module:function"` names."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from lt_trainer.errors import RecipeError

if TYPE_CHECKING:
    from collections.abc import Callable


def import_loader_factory(loader: str) -> Callable[..., Any]:
    """Import the function; the current folder is searched too.

    Raises:
        RecipeError: the module or function does not exist, or importing it fails.
    """
    module, _, name = loader.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    values = {"data.loader": loader}
    try:
        factory: Any = importlib.import_module(module)
        for part in name.split("."):
            factory = getattr(factory, part)
    except ImportError as exc:
        remedy = "install the module, add its folder to PYTHONPATH, or start the run in its folder"
        raise RecipeError(f"cannot be imported: {exc}", values=values, remedy=remedy) from exc
    except AttributeError as exc:
        raise RecipeError(f"{exc}", values=values, remedy="write it as module:function") from exc
    if not callable(factory):
        raise RecipeError("not a function", values=values, remedy="write it as module:function")
    return factory
