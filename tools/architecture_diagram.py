"""Diagrams of the packages in docs/images, drawn from the imports in their sources.

    python tools/architecture_diagram.py            # fails where a diagram does not match the sources
    python tools/architecture_diagram.py --write

architecture.svg is the data flow: packages, and on each arrow what one passes to the other (`FLOWS`). It contains every
package, and an arrow between two packages needs an import between them, in either direction.

imports.svg has an arrow from a package to each one that it imports, after transitive reduction. A package's row is the
length of its longest import path to the bottom. Below each name: the third-party packages of its base install. Both
take less than a second.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from check_dependencies import imported_modules
from members import ROOT, Member, ToolError, read_members

DIAGRAM_FILE, IMPORTS_DIAGRAM_FILE = "docs/images/architecture.svg", "docs/images/imports.svg"
WIDTH, BOX_WIDTH, BOX_HEIGHT, ROW_HEIGHT = 760, 216, 52, 100
STYLE = """text{font:14px system-ui,sans-serif;fill:#1f2328;text-anchor:middle}.s{font-size:11px;fill:#59636e}
rect{fill:#f6f8fa;stroke:#8c959f}path{stroke:#59636e;fill:none;marker-end:url(#a)}#a path{fill:#59636e;marker-end:none}
.l{font-size:12px;stroke:#fff;stroke-width:5px;paint-order:stroke}.g{fill:none;stroke-dasharray:4 4}
@media(prefers-color-scheme:dark){text{fill:#f0f6fc}.s{fill:#9198a1}rect{fill:#151b23;stroke:#656c76}
path{stroke:#9198a1}#a path{fill:#9198a1}.l{stroke:#0d1117}.g{fill:none}}"""

ENGINES = "engines"


@dataclass(frozen=True)
class Flow:
    """Data passed from one place of the flow to another.

    Attributes:
        source: a package, `ENGINES` for both engines, or a name of `OUTSIDE`.
        target: as `source`.
        carries: label of the arrow.
    """

    source: str
    target: str
    carries: str


PLACES: dict[str, tuple[int, int, str]] = {
    "lt-data": (380, 1, "text → token store → packs → rows"),
    "lt-launch": (122, 2, "local, ssh, Slurm, SageMaker"),
    "lt-trainer": (380, 2, "recipe, loop, run directory"),
    "lt-model": (638, 2, "Llama: shape, costs, torch module"),
    "lt-trainer-gpu": (262, 3, "CUDA and CPU: FSDP2, HSDP, TP"),
    "lt-trainer-neuron": (498, 3, "AWS Trainium"),
    "lt-ckpt": (380, 4, "shards → checkpoint → HF folder"),
}
"""Package → x of its box center, its row from the top, and its description."""
OUTSIDE: dict[str, tuple[int, int]] = {"text": (380, 0), "Hugging Face folder": (380, 5)}
"""Start and end of the flow: x and row."""
FLOWS = (
    Flow("text", "lt-data", "documents"),
    Flow("lt-data", "lt-trainer", "rows: ids, labels, documents"),
    Flow("lt-launch", "lt-trainer", "ranks"),
    Flow("lt-trainer", ENGINES, "StepBatch"),
    Flow("lt-model", ENGINES, "module, parameter table"),
    Flow(ENGINES, "lt-ckpt", "weights and optimizer state, as shards"),
    Flow("lt-ckpt", "Hugging Face folder", "config, safetensors, tokenizer"),
)


def import_graph(members: Mapping[str, Member]) -> dict[str, set[str]]:
    """Return the members that each member imports anywhere in its sources."""
    modules = {member.module: name for name, member in members.items()}
    found: dict[str, set[str]] = {name: set() for name in members}
    for name, member in members.items():
        for path in member.source_dir.rglob("*.py"):
            for top, _ in imported_modules(path.read_text(encoding="utf-8"), filename=str(path)):
                if modules.get(top, name) != name:
                    found[name].add(modules[top])
    return found


def longest_path_levels(edges: Mapping[str, Iterable[str]]) -> dict[str, int]:
    """Return the length of the longest path down from each node.

    Raises:
        ToolError: the imports have a cycle.
    """
    found: dict[str, int] = {}
    while len(found) < len(edges):
        ready = {name for name in edges if name not in found and set(edges[name]) <= set(found)}
        if not ready:
            raise ToolError(f"import cycle: {', '.join(sorted(set(edges) - set(found)))}")
        found |= {name: max((found[below] + 1 for below in edges[name]), default=0) for name in ready}
    return found


def transitive_reduction(edges: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Return the edges that are not implied by others."""

    def below(name: str) -> set[str]:
        return {name}.union(*(below(child) for child in edges[name]))

    return {
        name: {child for child in children if not any(child in below(o) for o in children - {child})}
        for name, children in edges.items()
    }


def render_svg(members: Mapping[str, Member]) -> str:
    """Return the import diagram as SVG, deterministically."""
    edges = import_graph(members)
    level = longest_path_levels(edges)
    rows = [sorted(name for name in level if level[name] == i) for i in range(max(level.values()) + 1)]
    height = len(rows) * ROW_HEIGHT - (ROW_HEIGHT - BOX_HEIGHT) + 24
    place: dict[str, tuple[int, int]] = {}
    for i, row in enumerate(reversed(rows)):
        slots = _x_positions(row, len(rows) - 1 - i)
        place |= {name: (x, 12 + i * ROW_HEIGHT) for name, x in slots.items()}
    lines = _head(height, "The packages of lt and which of them imports which")
    for name, children in sorted(transitive_reduction(edges).items()):
        for child in sorted(children):
            (x, y), (u, v) = place[name], place[child]
            middle = (y + BOX_HEIGHT + v) // 2
            lines.append(f'<path d="M{x} {y + BOX_HEIGHT}C{x} {middle} {u} {middle} {u} {v}"/>')
    for name, (x, y) in sorted(place.items()):
        nothing = "nothing more" if edges[name] else "standard library only"
        others = sorted({r.name for r in members[name].dependencies} - set(members))
        lines.append(f'<rect x="{x - BOX_WIDTH // 2}" y="{y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="8"/>')
        lines.append(f'<text x="{x}" y="{y + 22}">{name}</text>')
        lines.append(f'<text class="s" x="{x}" y="{y + 40}">{", ".join(others) or nothing}</text>')
    return "\n".join([*lines, "</svg>", ""])


def render_flow_svg(members: Mapping[str, Member]) -> str:
    """Return the data-flow diagram as SVG, deterministically.

    Raises:
        ToolError: a package is missing, or an arrow connects two packages without an import between them.
    """
    _check_flows(import_graph(members))
    height = 12 + 5 * ROW_HEIGHT + BOX_HEIGHT
    lines = _head(height, "What flows between the packages of lt")
    left = min(PLACES[name][0] for name in _packages(ENGINES)) - BOX_WIDTH // 2 - 10
    top = 2 + 3 * ROW_HEIGHT
    lines.append(
        f'<rect class="g" x="{left}" y="{top}" width="{WIDTH - 2 * left}" height="{BOX_HEIGHT + 20}" rx="12"/>'
    )
    labels = []
    for flow in FLOWS:
        (x, y), (u, v) = _port(flow.source, below=True), _port(flow.target, below=False)
        if flow.source in PLACES and flow.target in PLACES and PLACES[flow.source][1] == PLACES[flow.target][1]:
            y = v = 12 + PLACES[flow.source][1] * ROW_HEIGHT + BOX_HEIGHT // 2
            x, u = (x + BOX_WIDTH // 2, u - BOX_WIDTH // 2) if x < u else (x - BOX_WIDTH // 2, u + BOX_WIDTH // 2)
        elif ENGINES in (flow.source, flow.target) and x != u:
            u = x - BOX_WIDTH // 4
        lines.append(f'<path d="M{x} {y}L{u} {v}"/>')
        labels.append(
            f'<text class="l" x="{(x + u) // 2}" y="{(y + v) // 2 + (3 if y != v else -6)}">{flow.carries}</text>'
        )
    for name, (x, row, what) in PLACES.items():
        y = 12 + row * ROW_HEIGHT
        lines.append(f'<rect x="{x - BOX_WIDTH // 2}" y="{y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="8"/>')
        lines.append(f'<text x="{x}" y="{y + 22}">{name}</text>')
        lines.append(f'<text class="s" x="{x}" y="{y + 40}">{what}</text>')
    for name, (x, row) in OUTSIDE.items():
        lines.append(f'<text x="{x}" y="{12 + row * ROW_HEIGHT + BOX_HEIGHT // 2 + 5}">{name}</text>')
    return "\n".join([*lines, *labels, "</svg>", ""])


def _packages(name: str) -> list[str]:
    """Return the packages that a name of a flow refers to; none for what is outside."""
    if name == ENGINES:
        return ["lt-trainer-gpu", "lt-trainer-neuron"]
    return [name] if name in PLACES else []


def _check_flows(edges: Mapping[str, set[str]]) -> None:
    if set(edges) != set(PLACES):
        raise ToolError(f"PLACES does not match the packages: {', '.join(sorted(set(edges) ^ set(PLACES)))}")
    for flow in FLOWS:
        for one in _packages(flow.source):
            for other in _packages(flow.target):
                if other not in edges[one] and one not in edges[other]:
                    raise ToolError(
                        f"FLOWS: {flow.carries!r} connects {one} and {other}, and neither imports the other"
                    )


def _port(name: str, *, below: bool) -> tuple[int, int]:
    """Return the point where arrows leave (`below`) or reach a place."""
    if name == ENGINES:
        return WIDTH // 2, 2 + 3 * ROW_HEIGHT + (BOX_HEIGHT + 20 if below else 0)
    if name in OUTSIDE:
        x, row = OUTSIDE[name]
        return x, 12 + row * ROW_HEIGHT + (BOX_HEIGHT // 2 + 12 if below else BOX_HEIGHT // 2 - 12)
    x, row, _ = PLACES[name]
    return x, 12 + row * ROW_HEIGHT + (BOX_HEIGHT if below else 0)


def _head(height: int, title: str) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{title}</title>",
        f"<style>{STYLE}</style>",
        '<defs><marker id="a" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">',
        '<path d="M0 0L8 4L0 8z"/></marker></defs>',
    ]


def _x_positions(row: list[str], level: int) -> dict[str, int]:
    """Return evenly spaced centers; a single box in row 1 is placed over the last of the bottom row."""
    if len(row) == 1 and level == 1:
        return {row[0]: 3 * WIDTH // 4}
    return {name: (2 * i + 1) * WIDTH // (2 * len(row)) for i, name in enumerate(row)}


def main(arguments: list[str]) -> int:
    """Check or write the diagrams; return 1 if one does not match the sources."""
    members = read_members()
    now = {DIAGRAM_FILE: render_flow_svg(members), IMPORTS_DIAGRAM_FILE: render_svg(members)}
    if arguments == ["--write"]:
        for name, text in now.items():
            (ROOT / name).parent.mkdir(parents=True, exist_ok=True)
            (ROOT / name).write_text(text, encoding="utf-8")
        return 0
    if arguments:
        raise ToolError(f"unknown arguments {' '.join(arguments)}; the only option is --write")
    code = 0
    for name, text in now.items():
        same = (ROOT / name).is_file() and (ROOT / name).read_text(encoding="utf-8") == text
        print(f"{name} is up to date" if same else f"{name} is outdated; run tools/architecture_diagram.py --write")
        code = code if same else 1
    return code


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ToolError as exc:
        sys.exit(f"architecture_diagram: {exc}")
