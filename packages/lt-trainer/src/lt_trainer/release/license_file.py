"""`licences.toml`: names, licenses and origins of sources, which only a person can say.

    [release]
    name = "tiny"                       # required
    producer = "Example Lab"            # required
    version = "1.0"
    description = "what it is for, and what it is not for"
    url = "https://example.org/tiny"
    paper = "paper.pdf"                 # a file beside this one, copied into the release
    tolerance = 1e-4                    # of a loss, relative, where a rerun cannot be bit-equal

    [licenses]                          # SPDX expressions; more specific lines win
    distribution = "OpenMDW-1.0"        # of all that has no other line
    code = "Apache-2.0"
    data = "CDLA-Permissive-2.0"
    document = "CC-BY-4.0"

    [licenses.components]
    "Model parameters (Final)" = "Apache-2.0"

    [[sources]]
    path = "corpus/*.jsonl"             # pattern of the paths in the stores' manifests; the first that matches counts
    license = "CC-BY-4.0"
    redistribute = true
    url = "https://example.org/corpus"

    [stores.train.prepare]              # options of `lt data prepare` that the store does not record
    text_field = "content"

Nothing is ever invented: what is not given stays empty and is listed. Pure.
"""

import tomllib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression
from pydantic import AfterValidator, Field, ValidationError

from lt_trainer.release.bundle import InsidePath, Record, ReleaseError
from lt_trainer.release.mof import COMPONENTS, OPEN_FOR_ALL
from lt_trainer.toml import format_value


def _check_license(text: str) -> str:
    try:  # the framework's own is not in SPDX's list
        known = canonicalize_license_expression(text.replace(OPEN_FOR_ALL, f"LicenseRef-{OPEN_FOR_ALL}"))
    except InvalidLicenseExpression:
        raise ValueError("not an SPDX expression; for a license without an identifier use LicenseRef-NAME") from None
    return known.replace(f"LicenseRef-{OPEN_FOR_ALL}", OPEN_FOR_ALL)


def _check_component(name: str) -> str:
    if name not in COMPONENTS:
        raise ValueError(f"no such component; there are {', '.join(COMPONENTS)}")
    return name


Given = Annotated[str, Field(min_length=1)]
License = Annotated[str, Field(max_length=500), AfterValidator(_check_license)]
ComponentName = Annotated[str, AfterValidator(_check_component)]
PrepareOption = Literal["text_field", "tokens_field", "on_bad", "max_document_bytes", "unit_bytes"]
"""Options of `lt data prepare` that determine the tokens and are in no manifest."""


class ReleaseInfo(Record):
    """`[release]`."""

    name: Given
    producer: Given
    version: str = ""
    description: str = ""
    url: str = ""
    paper: InsidePath = ""
    tolerance: Annotated[float, Field(ge=0, lt=1)] = 1e-4


class Licenses(Record):
    """`[licenses]`: expressions by kind of content, and of single components."""

    distribution: License | None = None
    code: License | None = None
    data: License | None = None
    document: License | None = None
    components: Mapping[ComponentName, License] = {}


class SourceLicense(Record):
    """`[[sources]]`: license and origin of the source files that a pattern matches."""

    path: Given
    license: License | None = None
    redistribute: bool = False
    url: str = ""


class LicenseFile(Record):
    """Contents of `licences.toml`."""

    release: ReleaseInfo
    licenses: Licenses = Licenses()
    sources: tuple[SourceLicense, ...] = ()
    stores: Mapping[str, Mapping[Literal["prepare"], Mapping[PrepareOption, str | int]]] = {}

    def component_license(self, name: str) -> str:
        """Return the license of a component: its own line, that of its kind, that of the distribution, or ""."""
        kind = getattr(self.licenses, COMPONENTS[name].content)
        return self.licenses.components.get(name) or kind or self.licenses.distribution or ""

    def source(self, path: str) -> SourceLicense:
        """Return what is said about a source file; empty if nothing is."""
        normal = path.replace("\\", "/")
        for entry in self.sources:
            if fnmatchcase(normal, entry.path) or fnmatchcase(normal, f"*/{entry.path}"):
                return entry
        return SourceLicense(path="*")


def parse_license_file(text: str, source: str) -> LicenseFile:
    """Parse the text of a `licences.toml`; `source` names it in errors.

    Raises:
        ReleaseError: Not TOML, or wrong lines; all of them in one list.
    """
    try:
        return LicenseFile.model_validate(tomllib.loads(text))
    except ValidationError as exc:
        raise ReleaseError(source, [_describe(error) for error in exc.errors()]) from exc
    except (ValueError, RecursionError) as exc:
        raise ReleaseError(source, [f"not TOML: {exc}"]) from exc


def _describe(error: Mapping[str, Any]) -> str:
    name = ".".join(str(part) for part in error["loc"] if part != "[key]")
    value = "" if error["type"] == "missing" else f" = {format_value(error['input'])}"
    return f"{name}{value}: {error['msg'].removeprefix('Value error, ')}"
