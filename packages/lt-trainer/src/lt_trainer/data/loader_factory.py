"""Import of the custom loader function that `data.loader = "module:function"` names."""

import os
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

from lt_trainer.errors import RecipeError


def import_loader_factory(loader: str) -> Callable[..., Any]:
    """Import the function; the working directory is searched after all installed modules.

    Raises:
        RecipeError: the module or function does not exist, or importing the module raises an error.
    """
    if os.getcwd() not in sys.path:  # Python runs with -P: by itself it does not search there
        sys.path.append(os.getcwd())
    try:
        return pkgutil.resolve_name(loader)
    except (Exception, SystemExit) as exc:  # whatever the user's module raises while it is imported
        problem = f"cannot be imported: {exc}"
        remedy = "write it as module:function, of an installed module or one in PYTHONPATH or the working directory"
        if not isinstance(exc, ImportError | AttributeError):
            problem = f"cannot be imported: {type(exc).__name__}: {exc}"
        raise RecipeError(problem, values={"data.loader": loader}, remedy=remedy) from exc
