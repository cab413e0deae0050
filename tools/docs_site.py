"""Documentation site: configuration of mkdocs besides mkdocs.yml. `mkdocs build --strict` runs this as a hook.

Pages from elsewhere in the repository become pages of the site: the README is its start page; each package has its
README, its changelog and a reference of its public names, made from their docstrings. A link to a file that is such a
page is rewritten; a link to any other file outside docs/ (a test, a source) becomes plain text. The navigation is built
here too; a page of docs/ that is neither in it nor in `UNLISTED` is an error.
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
GUIDES = ("quickstart", "data", "recipe", "parallelism", "checkpoints", "evaluate", "release", "observability")
GUIDES += ("launch", "launch-ssh", "launch-slurm", "launch-sagemaker", "trainium", "troubleshooting", "migration")
"""The guides in reading order; others follow."""
UNLISTED = ("decisions.md",)
"""Pages of docs/ that are linked but not in the navigation; also listed in mkdocs.yml."""
TOP_LEVEL_PAGES = {
    "architecture.md": "Architecture",
    "decisions.md": "Decisions",
    "guarantees.md": "Guarantees",
    "known-limits.md": "Known limits",
}


def find_pages() -> dict[str, str]:
    """Return the path in the site of each page, by its file in the repository."""
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


def rewrite_links(text: str, source: str, known: Mapping[str, str]) -> str:
    """Return a page's text with its links rewritten for the site.

    Args:
        text: Markdown.
        source: the page's file in the repository.
        known: result of `find_pages`.
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
            return match[0]  # broken link: mkdocs reports it
        return f"{picture}[{words}]({os.path.relpath(place, here or '.')}{'#' + anchor if anchor else ''})"

    parts = re.split(r"(^ *```[^\n]*\n(?:[^\n]*\n)*? *```$|^    .*$)", text, flags=re.M)
    return "".join(part if number % 2 else LINK.sub(lead, part) for number, part in enumerate(parts))


def exported_names(package: str) -> list[str]:
    """Return a package's exports as module.name: the imports for type checkers in its `__init__`."""
    name = package.replace("-", "_")
    tree = ast.parse((ROOT / "packages" / package / "src" / name / "__init__.py").read_text(encoding="utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    names = [
        f"{node.module}.{alias.name}"
        for block in blocks or [tree]
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == name
        for alias in node.names
    ]
    return sorted(names, key=lambda exported: exported.rpartition(".")[2].lower())


def reference_page(package: str) -> str:
    """Return the reference page of a package, for mkdocstrings."""
    names = exported_names(package)
    blocks = "".join(f"\n::: {name}\n" for name in names)
    intro = (
        f"Names of `import {package.replace('-', '_')}`." if names else "No public names; it is loaded by entry point."
    )
    return f"# {package}: reference\n\n{intro}\n{blocks}"


def build_navigation(known: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the navigation in the form of mkdocs."""
    places = set(known.values())

    def inside(folder: str) -> list[str]:
        return sorted(place for place in places if os.path.dirname(place) == folder)

    packages = [
        {
            name: [
                {"Overview": f"packages/{name}.md"},
                {"Reference": f"api/{name}.md"},
                {"Changes": f"packages/{name}-changes.md"},
            ]
        }
        for name in PACKAGES
    ]
    order = [place for name in GUIDES if (place := f"guides/{name}.md") in places]
    others = [place for place in inside("guides") if place not in order]
    guides = [*order, *others, *inside("examples"), *[one for one in ("containers.md",) if one in places]]
    return [
        {"Start": "index.md"},
        {"Guides": guides},
        {"Packages": packages},
        {"Reference": inside("reference")},
        {"Guarantees": ["guarantees.md", "known-limits.md"]},
        {"Benchmarks": inside("benchmarks")},
        {"Internals": [one for one in ("architecture.md", "contributing.md", "security.md") if one in places]},
    ]


# ---- hooks called by mkdocs ----


def on_config(config: Any) -> Any:
    """Set the navigation."""
    config.nav = build_navigation(find_pages())
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages outside docs/."""
    File = import_module("mkdocs.structure.files").File

    for source, place in find_pages().items():
        if not source.startswith("docs/"):
            files.append(File.generated(config, place, content=(ROOT / source).read_text(encoding="utf-8")))
    for name in PACKAGES:
        files.append(File.generated(config, f"api/{name}.md", content=reference_page(name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrite the links of a page."""
    known = find_pages()
    source = next((file for file, place in known.items() if place == page.file.src_uri), None)
    return markdown if source is None else rewrite_links(markdown, source, known)
