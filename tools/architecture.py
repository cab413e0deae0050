"""The picture of the packages in docs/images/architecture.svg, drawn from what their sources import.

    python tools/architecture.py            # fails where the picture is not what the sources say
    python tools/architecture.py --write

An arrow goes from a package to one that it imports; one that follows from two others (lt-trainer-gpu imports lt-model,
but so does lt-trainer, on which it stands) is left out. A package stands as many rows above the bottom as the longest
way down from it is long. Below each name: what its base install brings from others. Under a second.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

from declared import imported
from members import ROOT, Member, ToolError, read

__all__ = ["drawing", "imports", "levels", "reduced"]

PICTURE = "docs/images/architecture.svg"
WIDTH, BOX, HEIGHT, ROW = 760, 216, 52, 100
STYLE = """text{font:14px system-ui,sans-serif;fill:#1f2328;text-anchor:middle}.s{font-size:11px;fill:#59636e}
rect{fill:#f6f8fa;stroke:#8c959f}path{stroke:#59636e;fill:none;marker-end:url(#a)}#a path{fill:#59636e;marker-end:none}
@media(prefers-color-scheme:dark){text{fill:#f0f6fc}.s{fill:#9198a1}rect{fill:#151b23;stroke:#656c76}
path{stroke:#9198a1}#a path{fill:#9198a1}}"""


def imports(members: Mapping[str, Member]) -> dict[str, set[str]]:
    """Which members each of them imports, at any place of its sources."""
    modules = {member.module: name for name, member in members.items()}
    found: dict[str, set[str]] = {name: set() for name in members}
    for name, member in members.items():
        for path in member.source.rglob("*.py"):
            for top, _ in imported(path.read_text(encoding="utf-8"), filename=str(path)):
                if modules.get(top, name) != name:
                    found[name].add(modules[top])
    return found


def levels(edges: Mapping[str, Iterable[str]]) -> dict[str, int]:
    """The length of the longest way down from each.

    Raises:
        ToolError: packages that import each other in a ring.
    """
    found: dict[str, int] = {}
    while len(found) < len(edges):
        ready = {name for name in edges if name not in found and set(edges[name]) <= set(found)}
        if not ready:
            raise ToolError(f"packages that import each other: {', '.join(sorted(set(edges) - set(found)))}")
        found |= {name: max((found[below] + 1 for below in edges[name]), default=0) for name in ready}
    return found


def reduced(edges: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The edges that do not follow from others."""

    def below(name: str) -> set[str]:
        return {name}.union(*(below(child) for child in edges[name]))

    return {
        name: {child for child in children if not any(child in below(o) for o in children - {child})}
        for name, children in edges.items()
    }


def drawing(members: Mapping[str, Member]) -> str:
    """The picture as SVG, the same text for the same sources."""
    edges = imports(members)
    level = levels(edges)
    rows = [sorted(name for name in level if level[name] == i) for i in range(max(level.values()) + 1)]
    height = len(rows) * ROW - (ROW - HEIGHT) + 24
    place: dict[str, tuple[int, int]] = {}
    for i, row in enumerate(reversed(rows)):
        slots = _slots(row, len(rows) - 1 - i)
        place |= {name: (x, 12 + i * ROW) for name, x in slots.items()}
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        "<title>The packages of lt and which of them imports which</title>",
        f"<style>{STYLE}</style>",
        '<defs><marker id="a" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">',
        '<path d="M0 0L8 4L0 8z"/></marker></defs>',
    ]
    for name, children in sorted(reduced(edges).items()):
        for child in sorted(children):
            (x, y), (u, v) = place[name], place[child]
            middle = (y + HEIGHT + v) // 2
            lines.append(f'<path d="M{x} {y + HEIGHT}C{x} {middle} {u} {middle} {u} {v}"/>')
    for name, (x, y) in sorted(place.items()):
        nothing = "nothing more" if edges[name] else "standard library only"
        others = sorted({r.name for r in members[name].dependencies} - set(members))
        lines.append(f'<rect x="{x - BOX // 2}" y="{y}" width="{BOX}" height="{HEIGHT}" rx="8"/>')
        lines.append(f'<text x="{x}" y="{y + 22}">{name}</text>')
        lines.append(f'<text class="s" x="{x}" y="{y + 40}">{", ".join(others) or nothing}</text>')
    return "\n".join([*lines, "</svg>", ""])


def _slots(row: list[str], level: int) -> dict[str, int]:
    """Horizontal centres, evenly spread; one alone just above the bottom stands over the last of the bottom row."""
    if len(row) == 1 and level == 1:
        return {row[0]: 3 * WIDTH // 4}
    return {name: (2 * i + 1) * WIDTH // (2 * len(row)) for i, name in enumerate(row)}


def main(arguments: list[str]) -> int:
    """Check or write the picture; returns 1 if it is not what the sources say."""
    path, now = ROOT / PICTURE, drawing(read())
    if arguments == ["--write"]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(now, encoding="utf-8")
        return 0
    if arguments:
        raise ToolError(f"unknown arguments {' '.join(arguments)}; there is --write")
    if not path.is_file() or path.read_text(encoding="utf-8") != now:
        print(f"{PICTURE} is not what the sources say: run tools/architecture.py --write")
        return 1
    print(f"{PICTURE} is what the sources say")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ToolError as exc:
        sys.exit(f"architecture: {exc}")
