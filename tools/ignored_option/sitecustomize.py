"""An option planted as ignored in every Python process that has this folder on PYTHONPATH.

LT_IGNORED_OPTION, a JSON object, says which option it is (`tools/option_schema.py` makes it):

- a field of a recipe or of an engine: reads of the attribute give its default, except those that only repeat or check
  the value: the recipe's codec (`lt_trainer.config.fields`), `__post_init__`, and what the dataclass itself does;
- an option of a command: the function behind the command is called with the option's default, or with "instead" where
  the option is required.

So the option is parsed, checked, printed and stored as ever, and has no effect. Only the standard library is imported;
a module is patched when it is imported, or at once if it already is.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Sequence
from types import FrameType, ModuleType
from typing import Any

VARIABLE = "LT_IGNORED_OPTION"
USERS_OF_THE_CODEC = ("llama_config",)
"""Functions that use values which the codec reads for them."""
ECHO_FILES = ("lt_trainer/config/fields.py", "/dataclasses.py", "<string>", "/copy.py")
"""Sources whose reads repeat a value; "<string>" has the methods that `dataclass` generates."""


def _is_echo(caller: FrameType) -> bool:
    """Return True if a read only repeats or checks the value."""
    if caller.f_code.co_name == "__post_init__":
        return True
    above: FrameType | None = caller
    while above is not None and above.f_code.co_filename.endswith(ECHO_FILES):
        above = above.f_back
    return above is not caller and (above is None or above.f_code.co_name not in USERS_OF_THE_CODEC)


class IgnoredField:
    """Data descriptor in place of a dataclass field: it keeps the value and shows the default."""

    def __init__(self, name: str, default: Any) -> None:
        self.name, self.default = name, default

    def __get__(self, instance: Any, owner: type) -> Any:
        """Return the value to what repeats or checks it, the default to all others."""
        is_echo = instance is not None and _is_echo(sys._getframe(1))
        return instance.__dict__.get(self.name, self.default) if is_echo else self.default

    def __set__(self, instance: Any, value: Any) -> None:
        """Keep the value."""
        instance.__dict__[self.name] = value


def ignore_field(module: ModuleType, spec: dict[str, Any]) -> None:
    """Replace a dataclass field of a module that has just been imported."""
    cls = getattr(module, spec["class"])
    setattr(cls, spec["name"], IgnoredField(spec["name"], cls.__dataclass_fields__[spec["name"]].default))


def ignore_parameter(module: ModuleType, spec: dict[str, Any]) -> None:
    """Make every typer command drop the option before its function is called; `module` is typer.core."""
    module.TyperCommand.invoke = invoke_without(module.TyperCommand.invoke, spec)


def invoke_without(invoke: Callable[[Any, Any], Any], spec: dict[str, Any]) -> Callable[[Any, Any], Any]:
    """Return `TyperCommand.invoke` with the option at its default, or at "instead"."""

    def invoke_ignoring(self: Any, ctx: Any) -> Any:
        function = self.callback
        if (function.__module__, function.__name__) == (spec["module"], spec["function"]):
            (parameter,) = [one for one in self.params if one.name == spec["name"]]
            given = spec["instead"] if "instead" in spec else parameter.get_default(ctx)
            ctx.params[spec["name"]] = parameter.process_value(ctx, given)
        return invoke(self, ctx)

    return invoke_ignoring


class PatchOnImport(importlib.abc.MetaPathFinder):
    """Finder that patches one module right after its code has run."""

    def __init__(self, name: str, patch: Callable[[ModuleType], None]) -> None:
        self.name, self.patch, self.is_searching = name, patch, False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the module's own spec with a loader that patches; None for all other modules."""
        if fullname != self.name or self.is_searching:
            return None
        self.is_searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self.is_searching = False
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self.patch(module)

        spec.loader.exec_module = exec_module
        return spec


def plant(text: str) -> None:
    """Plant what the JSON text says: now if the module is loaded, else when it is imported."""
    spec = json.loads(text)
    is_field = spec["kind"] == "field"
    target = spec["module"] if is_field else "typer.core"

    def patch(module: ModuleType) -> None:
        (ignore_field if is_field else ignore_parameter)(module, spec)

    if target in sys.modules:
        patch(sys.modules[target])
    else:
        sys.meta_path.insert(0, PatchOnImport(target, patch))


if os.environ.get(VARIABLE):
    plant(os.environ[VARIABLE])
