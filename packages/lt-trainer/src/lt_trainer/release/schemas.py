"""Documents of a release against their schemas, each by the library of its format's users.

    bom.cdx.json     CycloneDX 1.7, strictly, by cyclonedx-python-lib
    ai.spdx3.json    SPDX 3.0.1 by spdx-python-model: types, required properties, no identity that is not there
    croissant.json   Croissant 1.0 by mlcroissant; its warnings are notes, such as of licenses that nobody gave
    README.md        front matter and model index by huggingface_hub's ModelCardData

The first three are in the extra `release`; what is not installed is noted, never passed over. A document may be a
stranger's: contexts of JSON-LD are compared with ours before a library reads it, since it would fetch another one, and
no file that a document names is opened. Cost: the import of the libraries, about two seconds, and a read of the
documents.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lt_trainer.files import parse_json, read_text
from lt_trainer.release import croissant, spdx
from lt_trainer.release.errors import DAMAGE, describe_damage

EXTRA = "lt-trainer[release]"
MAX_CHARACTERS = 600
"""Length of what a library says; some of them repeat the document."""


@dataclass(frozen=True)
class _Schema:
    """Schema of a document.

    Attributes:
        name: Its name and version.
        module: The module that has it.
        check: Returns the problems of a text, and what the format only recommends.
    """

    name: str
    module: str
    check: Callable[[str], tuple[list[str], list[str]]]


def find_schema_problems(bundle: Path) -> tuple[list[str], list[str]]:
    """Check the documents of a release.

    Returns:
        The problems, and notes: what a format recommends, and what could not be checked because a library is missing.
    """
    problems: list[str] = []
    notes: list[str] = []
    for file, schema in SCHEMAS.items():
        unchecked = f"{file} was not checked against the schema of {schema.name}: {schema.module}"
        if find_spec(schema.module) is None:
            notes.append(f"{unchecked} is not installed; pip install '{EXTRA}'")
            continue
        try:
            found, recommended = schema.check(read_text(bundle / file))
        except ImportError as exc:  # without a package that it needs, or too old
            notes.append(f"{unchecked} cannot be used ({' '.join(str(exc).split())}); pip install '{EXTRA}'")
            continue
        except DAMAGE as exc:
            found, recommended = [describe_damage(exc)], []
        problems += [f"{file}: {schema.name}: {text[:MAX_CHARACTERS]}" for text in found]
        notes += [f"{file}: {schema.name}: {text[:MAX_CHARACTERS]}" for text in recommended]
    return problems, notes


def _check_cyclonedx(text: str) -> tuple[list[str], list[str]]:
    from cyclonedx.exception import MissingOptionalDependencyException
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    if not hasattr(SchemaVersion, "V1_7"):
        raise ImportError("it is older than the schema")
    document = parse_json(text)  # whose depth is bounded
    if isinstance(document, dict) and document.get("specVersion") != "1.7":  # of which the schema takes any text
        return [f"$.specVersion: {document.get('specVersion')!r} is not 1.7"], []
    try:
        error = JsonStrictValidator(SchemaVersion.V1_7).validate_str(text)
    except MissingOptionalDependencyException as exc:
        raise ImportError(str(exc)) from exc
    return [] if error is None else [f"{error.data.json_path}: {error.data.message}"], []


def _check_spdx(text: str) -> tuple[list[str], list[str]]:
    document = parse_json(text)
    if problem := _find_other_context(document, spdx.CONTEXT):
        return [problem], []
    from spdx_python_model import v3_0_1

    objects = v3_0_1.SHACLObjectSet()
    v3_0_1.JSONLDDeserializer().deserialize_data(document, objects)
    problems = [f"{identity} is named, and is not in it" for identity in sorted(map(str, objects.missing_ids))]
    if next(iter(objects.foreach_type("SpdxDocument")), None) is None:
        problems.append("has no SpdxDocument")
    v3_0_1.JSONLDSerializer().write(objects, io.BytesIO())  # which asks for the required properties
    return problems, []


def _check_croissant(text: str) -> tuple[list[str], list[str]]:
    document = parse_json(text)
    if problem := _find_other_context(document, croissant.CONTEXT):
        return [problem], []
    from mlcroissant import Dataset, ValidationError

    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)  # it logs what the issues have
    try:
        issues = Dataset(jsonld=document).metadata.ctx.issues
    except ValidationError as exc:
        return [str(exc)], []
    finally:
        logging.disable(previous)
    return sorted(map(str, issues.errors)), sorted(map(str, issues.warnings))


def _check_model_card(text: str) -> tuple[list[str], list[str]]:
    from huggingface_hub import ModelCard
    from yaml import YAMLError

    if not text.startswith("---\n"):
        return ["has no front matter"], []
    try:
        data = ModelCard(text).data
    except YAMLError as exc:
        return [str(exc)], []
    return [] if data.to_dict() else ["its front matter is empty"], []


def _find_other_context(document: Any, context: Any) -> str:
    """Return a problem if a document has another JSON-LD context than this one, anywhere; else ""."""
    if not isinstance(document, dict) or document.get("@context") != context:
        return "@context: is not that of the format"
    waiting: list[Any] = [value for name, value in document.items() if name != "@context"]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if "@context" in value:
                return f"@context: one more, {json.dumps(value['@context'])[:100]}"
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    return ""


SCHEMAS = {
    "bom.cdx.json": _Schema("CycloneDX 1.7", "cyclonedx", _check_cyclonedx),
    "ai.spdx3.json": _Schema("SPDX 3.0.1", "spdx_python_model", _check_spdx),
    "croissant.json": _Schema("Croissant 1.0", "mlcroissant", _check_croissant),
    "README.md": _Schema("the model card", "huggingface_hub", _check_model_card),
}
"""Document → its schema."""
