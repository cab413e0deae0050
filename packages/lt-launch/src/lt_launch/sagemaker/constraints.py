"""Offline validation of requests against SageMaker's service model, a data file of botocore.

botocore itself checks required members, types and minima; violated lengths, maxima, patterns and enumerations are
otherwise rejected by the service, minutes later. The walk below checks all of them and names field, value and limit.
Rules that the model cannot express (either an image or an algorithm, spot needs a longer wait, ...) are in `rules`.

Cost: reading the model is 0.06 CPU-seconds; botocore is not imported.
"""

import gzip
import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lt_launch.sagemaker.errors import SageMakerError
from lt_launch.sagemaker.rules import find_broken_rules
from lt_launch.sagemaker.violation import Violation, source_of, truncated_repr

__all__ = ["check_request", "find_violations", "load_model_shapes"]

UNICODE_CLASSES = {
    "L": "a-zA-Z",
    "N": "0-9",
    "Z": " ",
    "P": r"""!"#%&'()*,\-./:;?@\[\\\]_{}""",
    "S": r"$+<=>\^`|~",
    "M": "\ue000",
    "Alnum": "a-zA-Z0-9",
}
"""ASCII members of the Unicode classes in patterns, which Python's `re` does not support."""
ASCII_REPLACEMENTS = {"L": "a", "N": "0", "Z": " ", "P": "!", "S": "$", "M": "\ue000"}
"""ASCII replacement of a non-ASCII character in a pattern, by the first letter of its Unicode category."""


@cache
def load_model_shapes() -> Mapping[str, Any]:
    """Return the shapes of SageMaker's service model by name.

    Raises:
        SageMakerError: botocore is not installed.
    """
    spec = find_spec("botocore")
    if spec is None or not spec.submodule_search_locations:
        raise SageMakerError("checking a SageMaker request needs boto3: pip install 'lt-launch[sagemaker]'")
    versions = sorted((Path(spec.submodule_search_locations[0]) / "data" / "sagemaker").iterdir())
    packed, plain = versions[-1] / "service-2.json.gz", versions[-1] / "service-2.json"
    text = gzip.decompress(packed.read_bytes()) if packed.exists() else plain.read_bytes()
    return json.loads(text)["shapes"]


def check_request(shape: str, request: Mapping[str, Any], *, region: str = "") -> None:
    """Reject a request that the service would reject.

    Args:
        shape: name of the request in the service model.
        request: the request.
        region: region that it is sent to; "" = unknown.

    Raises:
        SageMakerError: names each field that violates a constraint, with the limit and the field to change.
    """
    violations = find_violations(shape, request)
    known = {item.field for item in violations}
    violations += [item for item in find_broken_rules(shape, request, region) if item.field not in known]
    if violations:
        lines = (str(_with_remedy(shape, item)) for item in violations)
        raise SageMakerError("SageMaker would reject this request:\n" + "\n".join(f"  {line}" for line in lines))


def _with_remedy(shape: str, violation: Violation) -> Violation:
    """Return the violation with the field of the run file, unless its remedy names it already."""
    source = source_of(shape, violation.field)
    if not source or source in violation.remedy:
        return violation
    remedy = f"{violation.remedy}, in {source}" if violation.remedy else f"change {source}"
    return replace(violation, remedy=remedy)


def find_violations(shape: str, value: Any, field: str = "") -> list[Violation]:
    """Return all constraints of the service model that `value` violates as the named shape."""
    return list(_walk(shape, value, field))


def _walk(name: str, value: Any, field: str) -> Iterator[Violation]:
    shape = load_model_shapes()[name]
    kind = shape["type"]
    expected, fits = _TYPES[kind]
    if not fits(value):
        yield Violation(field or name, f"expected {expected}, got {truncated_repr(value)}")
        return
    yield from _check_limits(shape, value, field or name)
    if kind == "structure":
        yield from _check_members(shape, value, field)
    elif kind == "list":
        for at, item in enumerate(value):
            yield from _walk(shape["member"]["shape"], item, f"{field}[{at}]")
    elif kind == "map":
        for key, item in value.items():
            yield from _walk(shape["key"]["shape"], key, f"{field} key {key!r}")
            yield from _walk(shape["value"]["shape"], item, f"{field}.{key}")


def _check_members(shape: Mapping[str, Any], value: Mapping[str, Any], field: str) -> Iterator[Violation]:
    prefix = f"{field}." if field else ""
    for missing in (member for member in shape.get("required", ()) if member not in value):
        yield Violation(f"{prefix}{missing}", "is required and missing")
    if shape.get("union") and len(value) != 1:
        yield Violation(field, f"takes exactly one of {', '.join(shape['members'])}")
    for member, item in value.items():
        if member in shape["members"]:
            yield from _walk(shape["members"][member]["shape"], item, f"{prefix}{member}")
        else:
            yield Violation(f"{prefix}{member}", "is not a field of SageMaker")


def _check_limits(shape: Mapping[str, Any], value: Any, field: str) -> Iterator[Violation]:
    has_length = shape["type"] in ("string", "list", "map", "blob")
    size, unit = (len(value), {"string": " characters"}.get(shape["type"], " entries")) if has_length else (value, "")
    found = f"it has {size}" if has_length else f"got {truncated_repr(value)}"
    if "min" in shape and size < shape["min"]:
        yield Violation(field, f"must be at least {shape['min']}{unit}, {found}")
    if "max" in shape and size > shape["max"]:
        yield Violation(field, f"must be at most {shape['max']}{unit}, {found}")
    if "enum" in shape and value not in shape["enum"]:
        yield Violation(field, f"{truncated_repr(value)} is not one of {_format_choices(shape['enum'], value)}")
    if "pattern" in shape and not _compile_pattern(shape["pattern"]).fullmatch(_as_ascii(value)):
        yield Violation(field, f"{truncated_repr(value)} does not fit the pattern {shape['pattern']}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_TYPES: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "structure": ("an object", lambda value: isinstance(value, Mapping)),
    "map": ("an object", lambda value: isinstance(value, Mapping)),
    "list": ("a list", lambda value: isinstance(value, list | tuple)),
    "string": ("text", lambda value: isinstance(value, str)),
    "boolean": ("true or false", lambda value: isinstance(value, bool)),
    "integer": ("a whole number", _is_integer),
    "long": ("a whole number", _is_integer),
    "float": ("a number", _is_number),
    "double": ("a number", _is_number),
    "timestamp": ("a time", lambda value: value is not None),
    "blob": ("bytes", lambda value: isinstance(value, bytes)),
}


def _format_choices(choices: list[str], value: Any) -> str:
    """Format a few choices completely; of many, those similar to the given value."""
    if len(choices) <= 8 or not isinstance(value, str):
        return ", ".join(choices[:8]) + (", ..." if len(choices) > 8 else "")
    from difflib import get_close_matches

    similar = get_close_matches(value, choices, n=4, cutoff=0.3)
    return f"the {len(choices)} values of SageMaker" + (f"; similar: {', '.join(similar)}" if similar else "")


@cache
def _compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compile a pattern of the service model, which uses Java syntax."""
    return re.compile(re.sub(r"\\p\{(\w+)\}", lambda found: UNICODE_CLASSES[found[1]], pattern))


def _as_ascii(text: str) -> str:
    if text.isascii():
        return text
    return "".join(
        char if char.isascii() else ASCII_REPLACEMENTS.get(unicodedata.category(char)[0], "\x00") for char in text
    )
