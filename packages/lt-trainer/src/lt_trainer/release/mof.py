"""Model Openness Framework (MOF 1.0): its 17 components, and the class that a set of them reaches.

A class needs each of its own components and those of the classes below it, each with an open license: Class III (open
model) < Class II (open tooling) < Class I (open science). A research paper takes the place of the technical report. A
license counts if it is in the tables of open licenses; one of another kind (a code license on data) counts and is
noted, as the framework's own tool does. A component without a license, or with one that is not in the tables, does not
count. Pure; cost: nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

ContentType = Literal["code", "data", "document"]
FRAMEWORK_VERSION, FRAMEWORK_DATE = "1.0", "2024-12-15"

CLASS_NAMES = {
    0: "no class",
    1: "Class I (open science)",
    2: "Class II (open tooling)",
    3: "Class III (open model)",
}


@dataclass(frozen=True, kw_only=True)
class Component:
    """Component of the framework: its kind of content and the class that needs it, or may have it."""

    content: ContentType
    class_number: int
    is_required: bool = True


COMPONENTS: Mapping[str, Component] = {
    "Model architecture": Component(content="code", class_number=3),
    "Data preprocessing code": Component(content="code", class_number=1),
    "Training code": Component(content="code", class_number=2),
    "Inference code": Component(content="code", class_number=2),
    "Evaluation code": Component(content="code", class_number=2),
    "Supporting libraries and tools": Component(content="code", class_number=2, is_required=False),
    "Model parameters (Final)": Component(content="data", class_number=3),
    "Model parameters (Intermediate)": Component(content="data", class_number=1),
    "Datasets": Component(content="data", class_number=1),
    "Evaluation data": Component(content="data", class_number=2),
    "Model metadata": Component(content="data", class_number=1, is_required=False),
    "Sample model outputs": Component(content="document", class_number=3, is_required=False),
    "Model card": Component(content="document", class_number=3),
    "Data card": Component(content="document", class_number=3),
    "Technical report": Component(content="document", class_number=3),
    "Research paper": Component(content="document", class_number=1),
    "Evaluation results": Component(content="document", class_number=3),
}

_CODE_LICENSES = """
0BSD AFL-3.0 AGPL-3.0-only AGPL-3.0-or-later Apache-2.0 Artistic-2.0 BSD-2-Clause BSD-2-Clause-Patent BSD-3-Clause
BSL-1.0 ECL-2.0 EPL-2.0 EUPL-1.2 GPL-2.0-only GPL-2.0-or-later GPL-3.0-only GPL-3.0-or-later ISC LGPL-2.1-only
LGPL-2.1-or-later LGPL-3.0-only LGPL-3.0-or-later MIT MIT-0 MPL-2.0 MS-PL MulanPSL-2.0 NCSA PSF-2.0 PostgreSQL
Python-2.0 UPL-1.0 Unlicense Zlib
"""
_DATA_LICENSES = """
CC-BY-4.0 CC-BY-SA-4.0 CC-PDDC CC0-1.0 CDLA-Permissive-1.0 CDLA-Permissive-2.0 CDLA-Sharing-1.0 ODC-By-1.0 ODbL-1.0
PDDL-1.0
"""
_DOCUMENT_LICENSES = """
CC-BY-3.0 CC-BY-4.0 CC-BY-SA-3.0 CC-BY-SA-4.0 CC0-1.0 GFDL-1.3-only GFDL-1.3-or-later
"""
OPEN_LICENSES: Mapping[ContentType, frozenset[str]] = {
    "code": frozenset(_CODE_LICENSES.split()),
    "data": frozenset(_DATA_LICENSES.split()),
    "document": frozenset(_DOCUMENT_LICENSES.split()),
}
"""SPDX identifiers of open licenses that were made for each kind of content."""
OPEN_FOR_ALL = frozenset({"OpenMDW-1.0"})
"""Open licenses for all components of a model."""


@dataclass(frozen=True, kw_only=True)
class ReleasedComponent:
    """Component of a release.

    Attributes:
        name: Its name, one of `COMPONENTS`.
        license: SPDX expression; "" if it has none.
        paths: Its files and folders in the bundle.
        missing: Why it does not count although it has files ("a source has no license"); "" if it counts.
    """

    name: str
    license: str
    paths: tuple[str, ...]
    missing: str = ""

    def __post_init__(self) -> None:
        assert self.name in COMPONENTS, self.name


@dataclass(frozen=True, kw_only=True)
class MofResult:
    """Class of a release.

    Attributes:
        class_number: 1, 2 or 3; 0 for none.
        missing: Class number → what it and the classes below it lack, in words; empty for a class that is reached.
        remarks: Open licenses that were made for another kind of content.
    """

    class_number: int
    missing: Mapping[int, tuple[str, ...]]
    remarks: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name of the class."""
        return CLASS_NAMES[self.class_number]


def is_open_license(expression: str) -> bool:
    """Return True if all licenses of an SPDX expression, or with OR one of them, are in the tables."""
    known = OPEN_FOR_ALL.union(*OPEN_LICENSES.values())
    alternatives = expression.replace("(", " ").replace(")", " ").split(" OR ")
    if "(" in expression and len(alternatives) > 1:  # nested: all of them must be open
        words = [word for part in alternatives for word in part.split(" AND ")]
        return all(word.strip() in known for word in words)
    return any(all(word.strip() in known for word in part.split(" AND ")) for part in alternatives)


def evaluate_openness(components: Sequence[ReleasedComponent]) -> MofResult:
    """Return the class that components reach, and what each class that is not reached lacks."""
    released = {component.name: component for component in components}
    missing: dict[int, tuple[str, ...]] = {}
    class_number = 0
    for number in (3, 2, 1):
        names = [name for name, part in COMPONENTS.items() if part.is_required and part.class_number >= number]
        reasons = [
            f"{name}: {reason}"
            for name in names
            if not _stands_in(name, released) and (reason := _lacks(name, released))
        ]
        missing[number] = tuple(reasons)
        if not reasons and class_number in (0, number + 1):
            class_number = number
    remarks = [
        f"{part.name}: {part.license} is an open license, but not made for {COMPONENTS[part.name].content}"
        for part in components
        if is_open_license(part.license)
        and " " not in part.license
        and part.license not in OPEN_FOR_ALL | OPEN_LICENSES[COMPONENTS[part.name].content]
    ]
    return MofResult(class_number=class_number, missing=missing, remarks=tuple(remarks))


def _stands_in(name: str, released: Mapping[str, ReleasedComponent]) -> bool:
    return name == "Technical report" and not _lacks("Research paper", released)


def _lacks(name: str, released: Mapping[str, ReleasedComponent]) -> str:
    """Return why a component does not count, or ""."""
    part = released.get(name)
    if part is None or not part.paths:
        return part.missing if part is not None and part.missing else "not in the release"
    if part.missing:
        return part.missing
    if not part.license:
        return "has no license"
    return "" if is_open_license(part.license) else f"{part.license} is not a license that counts as open"
