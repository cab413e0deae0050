"""Hook of `mkdocs build --strict`: what the site has beside docs/, and where its links lead.

The READMEs, the changelogs and the other texts of the root become pages under their own paths, and the root's README is
the start page. A link from one page to another is rewritten for the site; a link to any other file (a test, a source)
becomes plain text, and parentheses with nothing else in them are left out. Pages of a folder are in the order in which
the root's README lists packages and documentation, which is that of reading; others follow by name.
"""

from __future__ import annotations

import os.path
import re
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PATTERNS = ("*.md", "containers/README.md", "examples/*/README.md", "packages/*/README.md", "packages/*/CHANGELOG.md")
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
ONLY_LINK = re.compile(r"\s*\(\[[^\]]*\]\(([^)\s]+)\)\)")
CODE = re.compile(r"(^ *```[^\n]*\n(?:[^\n]*\n)*? *```$|^    .*$)", re.M)


def site_path(file: str) -> str | None:
    """Return where a file of the repository stands in the site; None if it does not."""
    if file.startswith("docs/"):
        return file.removeprefix("docs/")
    if any(Path(file).match(pattern) for pattern in PATTERNS):
        return "index.md" if file == "README.md" else file
    return None


def rewrite_links(text: str, source: str) -> str:
    """Return the Markdown of the page of a file with its links outside code rewritten for the site."""
    here = os.path.dirname(site_path(source) or "")

    def rewrite(match: re.Match[str]) -> str:
        picture, words, target = match.groups()
        path, sharp, anchor = target.partition("#")
        file = os.path.normpath(os.path.join(os.path.dirname(source), path))
        if not path or re.match(r"[a-z]+:", target) or not (ROOT / file).exists():
            return match[0]  # mkdocs tells of a link that leads nowhere
        place = site_path(f"{file}/README.md" if (ROOT / file / "README.md").is_file() else file)
        return f"{picture}[{words}]({os.path.relpath(place, here or '.')}{sharp}{anchor})" if place else words

    def leave_out(match: re.Match[str]) -> str:
        file = os.path.normpath(os.path.join(os.path.dirname(source), match[1]))
        is_elsewhere = (ROOT / file).is_file() and site_path(file) is None
        return "" if is_elsewhere else match[0]

    parts = CODE.split(text)
    for i in range(0, len(parts), 2):  # those between are code
        parts[i] = LINK.sub(rewrite, ONLY_LINK.sub(leave_out, parts[i]))
    return "".join(parts)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages outside docs/."""
    generated = import_module("mkdocs.structure.files").File.generated
    for path in (path for pattern in PATTERNS for path in sorted(ROOT.glob(pattern))):
        source = path.relative_to(ROOT).as_posix()
        files.append(generated(config, site_path(source), content=path.read_text(encoding="utf-8")))
    return files


def on_nav(nav: Any, config: Any, files: Any) -> Any:
    """Sort the pages of each folder."""
    lists = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## Packages\n")[2]
    files = [match[3] for match in LINK.finditer(lists)]
    order = [site_path(f"{file}/README.md" if (ROOT / file).is_dir() else file) for file in files]

    def place(item: Any) -> int:
        """Return the place of a page, or of the folder of the first of its pages that is listed."""
        if item.is_section:
            return min(map(place, item.children))
        return order.index(item.file.src_uri) if item.file.src_uri in order else len(order)

    def sort(items: list[Any]) -> None:
        items.sort(key=place)
        for item in items:
            if item.is_section:
                sort(item.children)

    for section in nav.items:
        if section.is_section:
            sort(section.children)
    return nav


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrite the links of a page."""
    place = page.file.src_uri
    source = "README.md" if place == "index.md" else place if page.file.generated_by else f"docs/{place}"
    return rewrite_links(markdown, source)
