"""The documentation site: what mkdocs is told beside mkdocs.yml. `mkdocs build --strict` runs this as a hook.

Pages that live elsewhere in the repository become pages of the site: the README is its start, each package has its
README, its changelog and a reference of its public names, made from their docstrings. A link to a file that is such a
page leads there; a link to any other file outside docs/ (a test, a source) becomes plain text, since the site has no
place for it. The navigation is made here too, and a page of docs/ that stands nowhere in it is an error.
"""

from __future__ import annotations

import ast
import os.path
import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("lt-data", "lt-model", "lt-ckpt", "lt-trainer", "lt-trainer-gpu", "lt-trainer-neuron", "lt-launch")
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
SECTIONS = {"guides": "Guides", "formats": "Formats", "benchmarks": "Benchmarks"}
"""Folders of docs/ and how they are called; the pages in them stand in the order of their names."""
LOOSE = {
    "architecture.md": "Architecture",
    "decisions.md": "Decisions",
    "guarantees.md": "Guarantees",
    "known-limits.md": "Known limits",
}


def pages() -> dict[str, str]:
    """Every page of the site: its file in the repository → its place in the site."""
    found = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}
    if (ROOT / "SECURITY.md").exists():
        found["SECURITY.md"] = "security.md"
    for name in PACKAGES:
        found[f"packages/{name}/README.md"] = f"packages/{name}.md"
        found[f"packages/{name}/CHANGELOG.md"] = f"packages/{name}-changes.md"
    for path in sorted((ROOT / "examples").glob("*/README.md")):
        found[path.relative_to(ROOT).as_posix()] = f"examples/{path.parent.name}.md"
    if (ROOT / "containers" / "README.md").exists():
        found["containers/README.md"] = "containers.md"
    for path in sorted((ROOT / "docs").rglob("*.md")):
        found[path.relative_to(ROOT).as_posix()] = path.relative_to(ROOT / "docs").as_posix()
    return found


def relinked(text: str, source: str, known: Mapping[str, str]) -> str:
    """A page's text with its links as they must be in the site.

    Args:
        text: Markdown.
        source: the page's file in the repository.
        known: as `pages` gives.
    """
    here = os.path.dirname(known[source])

    def lead(match: re.Match[str]) -> str:
        picture, words, target = match.groups()
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        path, _, anchor = target.partition("#")
        file = os.path.normpath(os.path.join(os.path.dirname(source), path))
        if (ROOT / file).is_dir() and f"{file}/README.md" in known:
            file = f"{file}/README.md"
        if file in known:
            place = known[file]
        elif file.startswith("docs/") and not file.endswith(".md") and (ROOT / file).is_file():
            place = file.removeprefix("docs/")
        elif (ROOT / file).exists():
            return words
        else:
            return match[0]  # leads nowhere: mkdocs says so
        return f"{picture}[{words}]({os.path.relpath(place, here or '.')}{'#' + anchor if anchor else ''})"

    parts = re.split(r"(^ *```[^\n]*\n(?:[^\n]*\n)*? *```$|^    .*$)", text, flags=re.M)
    return "".join(part if number % 2 else LINK.sub(lead, part) for number, part in enumerate(parts))


def public_names(package: str) -> list[str]:
    """What a package exports, as module.name: the imports that its `__init__` shows to type checkers."""
    name = package.replace("-", "_")
    tree = ast.parse((ROOT / "packages" / package / "src" / name / "__init__.py").read_text(encoding="utf-8"))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == name:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return sorted(found, key=lambda one: one.rpartition(".")[2].lower())


def reference(package: str) -> str:
    """The page with the reference of a package, for mkdocstrings."""
    names = public_names(package)
    blocks = "".join(f"\n::: {name}\n" for name in names)
    what = (
        f"What `import {package.replace('-', '_')}` gives."
        if names
        else "It exports nothing: it is found by entry point."
    )
    return f"# {package}: reference\n\n{what}\n{blocks}"


def navigation(known: Mapping[str, str]) -> list[dict[str, Any]]:
    """The navigation, as mkdocs takes it."""
    places = set(known.values())

    def inside(folder: str) -> list[str]:
        return sorted(place for place in places if os.path.dirname(place) == folder)

    packages = [
        {
            name: [
                {"What it is": f"packages/{name}.md"},
                {"Reference": f"api/{name}.md"},
                {"Changes": f"packages/{name}-changes.md"},
            ]
        }
        for name in PACKAGES
    ]
    guides = [*inside("guides"), *inside("examples"), *[one for one in ("containers.md",) if one in places]]
    return [
        {"Start": "index.md"},
        {"Guides": guides},
        {"Packages": packages},
        {"Formats": inside("formats")},
        {"Guarantees": ["guarantees.md", "known-limits.md"]},
        {"Benchmarks": inside("benchmarks")},
        {
            "Inside": [
                one for one in ("architecture.md", "decisions.md", "contributing.md", "security.md") if one in places
            ]
        },
    ]


# ---- what mkdocs calls ----


def on_config(config: Any) -> Any:
    """Set the navigation."""
    config.nav = navigation(pages())
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that do not live in docs/."""
    File = import_module("mkdocs.structure.files").File

    for source, place in pages().items():
        if not source.startswith("docs/"):
            files.append(File.generated(config, place, content=(ROOT / source).read_text(encoding="utf-8")))
    for name in PACKAGES:
        files.append(File.generated(config, f"api/{name}.md", content=reference(name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Lead the links of a page to pages of the site."""
    known = pages()
    source = next((file for file, place in known.items() if place == page.file.src_uri), None)
    return markdown if source is None else relinked(markdown, source, known)
