"""`licences.toml`: names, licenses and origins of sources, which only a person can say.

    [release]
    name = "tiny"                       # required
    producer = "Example Lab"            # required
    version = "1.0"
    authors = ["Ada Example"]
    description = "what it is for, and what it is not for"
    url = "https://example.org/tiny"
    paper = "paper.pdf"                 # a file, copied into the bundle
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
    name = "Example corpus"
    url = "https://example.org/corpus"

    [stores.train.prepare]              # options of `lt data prepare` that the store does not record
    text_field = "content"

Nothing is ever invented: what is not given stays empty and is listed. Pure but for `read_license_file`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, get_args, get_origin

from lt_trainer.files import parse_toml, read_text
from lt_trainer.release.errors import ReleaseError
from lt_trainer.release.mof import COMPONENTS

SPDX_WORD = re.compile(r"(?!(?:AND|OR|WITH)$)[A-Za-z0-9][A-Za-z0-9.+-]*")
SPDX_RULES = (re.compile(r"\( x \)"), re.compile(r"x WITH x"), re.compile(r"x (?:AND|OR) x"))
"""What is an expression if each `x` is one."""
MAX_EXPRESSION = 2000
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://\S+")
GLOBAL_LICENSES = ("distribution", "code", "data", "document")
PREPARE_OPTIONS = {
    "text_field": str,
    "tokens_field": str,
    "on_bad": str,
    "max_document_bytes": int,
}
"""Options of `lt data prepare` that determine the tokens and are not in a store's manifest."""


@dataclass(frozen=True, kw_only=True)
class ReleaseInfo:
    """`[release]`."""

    name: str = ""
    producer: str = ""
    version: str = ""
    authors: tuple[str, ...] = ()
    description: str = ""
    url: str = ""
    paper: str = ""
    tolerance: float = 1e-4


@dataclass(frozen=True, kw_only=True)
class SourceLicense:
    """`[[sources]]`: license and origin of the source files that a pattern matches."""

    path: str = ""
    license: str = ""
    redistribute: bool = False
    name: str = ""
    url: str = ""


@dataclass(frozen=True, kw_only=True)
class LicenseFile:
    """Contents of `licences.toml`; all empty without one."""

    release: ReleaseInfo = field(default_factory=ReleaseInfo)
    licenses: Mapping[str, str] = field(default_factory=dict)
    component_licenses: Mapping[str, str] = field(default_factory=dict)
    sources: tuple[SourceLicense, ...] = ()
    prepare: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Store (as in the bundle) → options of `lt data prepare`."""

    def component_license(self, name: str) -> str:
        """Return the license of a component: its own line, that of its kind, that of the distribution, or ""."""
        lines = (self.component_licenses.get(name), self.licenses.get(COMPONENTS[name].content))
        return next((line for line in lines if line), self.licenses.get("distribution", ""))

    def source(self, path: str) -> SourceLicense:
        """Return what is said about a source file; empty if nothing is."""
        normal = path.replace("\\", "/")
        for entry in self.sources:
            if fnmatchcase(normal, entry.path) or fnmatchcase(normal, f"*/{entry.path}"):
                return entry
        return SourceLicense(path=path)


def read_license_file(path: Path) -> LicenseFile:
    """Read a `licences.toml`.

    Raises:
        ReleaseError: It cannot be read, or has unknown or empty lines; all of them in one list.
    """
    try:
        return parse_license_file(read_text(path), str(path))
    except (OSError, UnicodeDecodeError) as exc:
        raise ReleaseError(f"--licenses = {path}", [f"cannot be read ({exc}); give a TOML file"]) from exc


def parse_license_file(text: str, source: str) -> LicenseFile:
    """Parse the text of a `licences.toml`; `source` names it in errors.

    Raises:
        ReleaseError: Not TOML, or unknown or empty lines; all of them in one list.
    """
    try:
        table = parse_toml(text)
    except ValueError as exc:
        raise ReleaseError(source, [f"not TOML: {exc}"]) from exc
    problems: list[str] = []
    for name in sorted(table.keys() - {"release", "licenses", "sources", "stores"}):
        problems.append(f"{name}: no such table; there are release, licenses, sources and stores")
    release = _build(ReleaseInfo, _table(table, "release", problems), "release", problems)
    _check_texts("release", _table(table, "release", []), problems)
    if not 0 <= release.tolerance < 1:
        problems.append(f"release.tolerance = {release.tolerance!r}: must be from 0 to below 1")
    licenses, of_components = _read_licenses(_table(table, "licenses", problems), problems)
    listed = table.get("sources", [])
    if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
        problems.append("sources: must be tables; write [[sources]]")
        listed = []
    sources = [_build(SourceLicense, entry, f"sources[{i}]", problems) for i, entry in enumerate(listed)]
    for i, (entry, given) in enumerate(zip(sources, listed, strict=True)):
        if not entry.path:
            problems.append(f"sources[{i}].path: missing; give a pattern of the paths that the store's manifest lists")
        _check_texts(f"sources[{i}]", given, problems)
        if "license" in given:
            _check_license(f"sources[{i}].license", entry.license, problems)
    prepare = _prepare_options(_table(table, "stores", problems), problems)
    if problems:
        raise ReleaseError(source, problems)
    return LicenseFile(
        release=release,
        licenses=licenses,
        component_licenses=of_components,
        sources=tuple(sources),
        prepare=prepare,
    )


def _read_licenses(table: Mapping[str, Any], problems: list[str]) -> tuple[dict[str, str], Mapping[str, str]]:
    """Return the licenses of all kinds of content and those of components."""
    licenses = dict(table)
    of_components = _table(licenses, "components", problems)
    licenses.pop("components", None)
    for name in sorted(licenses.keys() - set(GLOBAL_LICENSES)):
        problems.append(f"licenses.{name}: no such line; there are {', '.join(GLOBAL_LICENSES)}, components")
    for name in of_components:
        if name not in COMPONENTS:
            problems.append(f"licenses.components.{name}: no such component; there are {', '.join(COMPONENTS)}")
    for name, value in (*licenses.items(), *((f"components.{name}", v) for name, v in of_components.items())):
        _check_license(f"licenses.{name}", value, problems)
    return licenses, of_components


def _table(parent: Mapping[str, Any], name: str, problems: list[str]) -> Mapping[str, Any]:
    value = parent.get(name, {})
    if isinstance(value, dict):
        return value
    problems.append(f"{name} = {value!r}: must be a table; write [{name}]")
    return {}


def _check_license(name: str, value: object, problems: list[str]) -> None:
    if not isinstance(value, str) or not value.strip():
        problems.append(f"{name} = {value!r}: must not be empty; give an SPDX expression, or remove the line")
    elif not is_spdx_expression(value):
        problems.append(
            f"{name} = {value!r}: not an SPDX expression; for a license without an identifier use LicenseRef-NAME"
        )


def is_spdx_expression(text: str) -> bool:
    """Return True for identifiers joined by AND, OR, WITH and parentheses, listed by SPDX or not."""
    if not text.isprintable() or len(text) > MAX_EXPRESSION:
        return False
    words = re.findall(r"[()]|[^ ()]+", text)
    left = " ".join("x" if SPDX_WORD.fullmatch(word) else word for word in words)
    shorter = ""
    while shorter != left:
        shorter = left
        for rule in SPDX_RULES:
            left = rule.sub("x", left)
    return left == "x"


def _check_texts(where: str, texts: Mapping[str, Any], problems: list[str]) -> None:
    """Add a problem for each text that would change a terminal or a card, and each bad address."""
    for name, value in texts.items():
        for text in value if isinstance(value, list) else [value]:
            if not isinstance(text, str) or name == "license":
                continue
            shown = text.replace("\n", " ").replace("\t", " ") if name == "description" else text
            if not shown.isprintable():
                problems.append(f"{where}.{name} = {text!r}: has a control character or a line break; remove it")
            elif name == "url" and text and not URL.fullmatch(text):
                problems.append(f"{where}.{name} = {text!r}: not an address; write it with its scheme, as https://...")


def _build(cls: Any, table: Mapping[str, Any], where: str, problems: list[str]) -> Any:
    """Return the dataclass of a table; a value of another type becomes a problem."""
    types = {item.name: item.type for item in fields(cls)}
    values: dict[str, Any] = {}
    for name, value in table.items():
        wanted = types.get(name)
        if wanted is None:
            problems.append(f"{where}.{name}: no such line; there are {', '.join(types)}")
            continue
        if get_origin(wanted) is tuple:
            fits = isinstance(value, list) and all(isinstance(item, get_args(wanted)[0]) for item in value)
            value = tuple(value) if fits else value
        elif wanted is float:
            fits = isinstance(value, int | float) and not isinstance(value, bool)
        else:
            fits = type(value) is wanted
        if not fits:
            problems.append(f"{where}.{name} = {value!r}: must be {getattr(wanted, '__name__', wanted)}")
            continue
        values[name] = value
    return cls(**values)


def _prepare_options(stores: Mapping[str, Any], problems: list[str]) -> dict[str, Mapping[str, Any]]:
    found: dict[str, Mapping[str, Any]] = {}
    for store, table in stores.items():
        options = table.get("prepare", {}) if isinstance(table, dict) else None
        if not isinstance(options, dict) or table.keys() - {"prepare"}:
            problems.append(f"stores.{store}: has a table `prepare` and nothing else; write [stores.{store}.prepare]")
            continue
        for name, value in options.items():
            if not isinstance(value, PREPARE_OPTIONS.get(name, ())):
                problems.append(
                    f"stores.{store}.prepare.{name} = {value!r}: no such option; there are {', '.join(PREPARE_OPTIONS)}"
                )
        found[store] = options
    return found
