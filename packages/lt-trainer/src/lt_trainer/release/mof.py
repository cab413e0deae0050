"""Model Openness Framework (MOF 1.0): its 17 components, and the class that a set of them reaches.

A class needs each of its own components and those of the classes below it, each with an open license: Class III (open
model) < Class II (open tooling) < Class I (open science). A research paper takes the place of the technical report. A
license counts if it is in the table of open licenses, also one of another kind (a code license on data), as in the
framework's own tool. A component without a license, or with one that is not in the table, does not count. Pure.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

ContentType = Literal["code", "data", "document"]
FRAMEWORK_VERSION, FRAMEWORK_DATE = "1.0", "2024-12-15"

CLASS_NAMES = {
    0: "no class",
    1: "Class I (open science)",
    2: "Class II (open tooling)",
    3: "Class III (open model)",
}


class Component(NamedTuple):
    """Component of the framework: its kind of content and the class that needs it, or may have it."""

    content: ContentType
    class_number: int
    is_required: bool = True


COMPONENTS: Mapping[str, Component] = {
    "Model architecture": Component("code", 3),
    "Data preprocessing code": Component("code", 1),
    "Training code": Component("code", 2),
    "Inference code": Component("code", 2),
    "Evaluation code": Component("code", 2),
    "Supporting libraries and tools": Component("code", 2, is_required=False),
    "Model parameters (Final)": Component("data", 3),
    "Model parameters (Intermediate)": Component("data", 1),
    "Datasets": Component("data", 1),
    "Evaluation data": Component("data", 2),
    "Model metadata": Component("data", 1, is_required=False),
    "Sample model outputs": Component("document", 3, is_required=False),
    "Model card": Component("document", 3),
    "Data card": Component("document", 3),
    "Technical report": Component("document", 3),
    "Research paper": Component("document", 1),
    "Evaluation results": Component("document", 3),
}

_OPEN_LICENSES = """
0BSD AFL-3.0 AGPL-3.0-only AGPL-3.0-or-later Apache-2.0 Artistic-2.0 BSD-2-Clause BSD-2-Clause-Patent BSD-3-Clause
BSL-1.0 ECL-2.0 EPL-2.0 EUPL-1.2 GPL-2.0-only GPL-2.0-or-later GPL-3.0-only GPL-3.0-or-later ISC LGPL-2.1-only
LGPL-2.1-or-later LGPL-3.0-only LGPL-3.0-or-later MIT MIT-0 MPL-2.0 MS-PL MulanPSL-2.0 NCSA PSF-2.0 PostgreSQL
Python-2.0 UPL-1.0 Unlicense Zlib
CC-BY-3.0 CC-BY-4.0 CC-BY-SA-3.0 CC-BY-SA-4.0 CC-PDDC CC0-1.0 CDLA-Permissive-1.0 CDLA-Permissive-2.0
CDLA-Sharing-1.0 GFDL-1.3-only GFDL-1.3-or-later ODC-By-1.0 ODbL-1.0 PDDL-1.0
"""
OPEN_FOR_ALL = "OpenMDW-1.0"
"""The framework's own license, for all components of a model."""
OPEN_LICENSES = frozenset({OPEN_FOR_ALL, *_OPEN_LICENSES.split()})
"""SPDX identifiers of open licenses, for code, data or documents."""


class ReleasedComponent(NamedTuple):
    """Component of a release.

    Attributes:
        name: Its name, one of `COMPONENTS`.
        license: SPDX expression; "" if it has none.
        paths: Its files and folders in the release.
        missing: Why it does not count although it has files ("a source has no license"); "" if it counts.
    """

    name: str
    license: str
    paths: tuple[str, ...]
    missing: str = ""


class MofResult(NamedTuple):
    """Class of a release.

    Attributes:
        class_number: 1, 2 or 3; 0 for none.
        missing: Class number → what it and the classes below it lack, in words; empty for a class that is reached.
    """

    class_number: int
    missing: Mapping[int, tuple[str, ...]]

    @property
    def name(self) -> str:
        """Name of the class."""
        return CLASS_NAMES[self.class_number]


def is_open_license(expression: str) -> bool:
    """Return True if all licenses of an SPDX expression, or with OR one of them, are in the tables."""
    if "(" in expression:  # nested: all of them must be open
        expression = re.sub(r"[()]", " ", expression).replace(" OR ", " AND ")
    return any(all(word.strip() in OPEN_LICENSES for word in part.split(" AND ")) for part in expression.split(" OR "))


def evaluate_openness(components: Sequence[ReleasedComponent]) -> MofResult:
    """Return the class that components reach, and what each class that is not reached lacks."""
    lacks = dict.fromkeys(COMPONENTS, "not in the release") | {part.name: _lacks(part) for part in components}
    if not lacks["Research paper"]:
        lacks["Technical report"] = ""
    missing: dict[int, tuple[str, ...]] = {}
    class_number = 0
    for number in (3, 2, 1):
        names = [name for name, part in COMPONENTS.items() if part.is_required and part.class_number >= number]
        missing[number] = tuple(f"{name}: {lacks[name]}" for name in names if lacks[name])
        if not missing[number]:  # those of a class are also needed by the next
            class_number = number
    return MofResult(class_number, missing)


def _lacks(part: ReleasedComponent) -> str:
    """Return why a component does not count, or ""."""
    if part.missing or not part.license:
        return part.missing or "has no license"
    return "" if is_open_license(part.license) else f"{part.license} is not a license that counts as open"
