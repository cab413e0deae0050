"""Figures of a release, drawn from its own run/metrics.jsonl as SVG; needs Python alone.

    python plots.py          writes figures/*.svg beside this file

This file is in the release; the same log gives the same bytes. Steps that were repeated after a kill or a rollback are
drawn with their last values. Cost: one read of the log.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 280, 76, 16, 34, 40
SERIES = (
    ("loss", "Training loss, nats per token", "loss", "val_loss"),
    ("learning-rate", "Learning rate", "learning_rate", ""),
    ("gradient-norm", "Gradient norm before clipping", "grad_norm", ""),
    ("throughput", "Tokens per second", "tokens_per_sec", ""),
)
"""File, title, field of the line, field of the dots."""
N_TICKS = 5
MAX_POINTS = 2000
"""A line of more points is drawn with the mean of equal runs of steps."""

Point = tuple[float, float]


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a log, without training records that later ones replace."""
    kept: list[dict[str, Any]] = []
    last = -math.inf
    for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
        record = json.loads(line)
        if "loss" in record:
            if record["step"] <= last:
                kept = [earlier for earlier in kept if earlier["step"] < record["step"]]
            last = record["step"]
        kept.append(record)
    return kept


def draw_figures(records: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the SVG text of each figure that has numbers, by file name."""
    figures: dict[str, str] = {}
    for name, title, line_field, dot_field in SERIES:
        line, dots = _points(records, line_field), _points(records, dot_field)
        if line:
            figures[f"{name}.svg"] = _figure(title, _thin(line), dots)
    return figures


def _points(records: Sequence[dict[str, Any]], field: str) -> list[Point]:
    values = ((record["step"], record[field]) for record in records if isinstance(record.get(field), int | float))
    return [(float(step), float(value)) for step, value in values if math.isfinite(value)]


def _thin(points: list[Point]) -> list[Point]:
    size = -(-len(points) // MAX_POINTS)
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [(group[-1][0], math.fsum(value for _, value in group) / len(group)) for group in groups]


def _figure(title: str, line: list[Point], dots: list[Point]) -> str:
    xs, ys = zip(*(line + dots), strict=True)
    x_low, x_high = min(xs), max(max(xs), min(xs) + 1)
    y_low, y_high = min(ys), max(ys)
    margin = 0.05 * (y_high - y_low) or abs(y_high) or 1.0
    y_low, y_high = y_low - margin, y_high + margin

    def place(point: Point) -> Point:
        x = LEFT + (point[0] - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)
        y = HEIGHT - BOTTOM - (point[1] - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)
        return x, y

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
        f'font-size="12" fill="#1c2330"><title>{title}</title><rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{title}{", validation as dots" if dots else ""}</text>',
    ]
    for i in range(N_TICKS):
        share = i / (N_TICKS - 1)
        y_value, x_value = y_low + share * (y_high - y_low), x_low + share * (x_high - x_low)
        _, y = place((x_low, y_value))
        x, _ = place((x_value, y_low))
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#dfe3ea"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{y_value:.4g}</text>')
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{x_value:.0f}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">step</text>')
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, line))
    parts.append(f'<polyline points="{path}" fill="none" stroke="#2f6fbf" stroke-width="1.5"/>')
    parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="#c2701c"/>' for x, y in map(place, dots)]
    return "\n".join(parts) + "\n</svg>\n"


def main() -> None:
    """Draw the figures of the release in this file's folder."""
    folder = Path(__file__).resolve().parent
    (folder / "figures").mkdir(exist_ok=True)
    for name, text in draw_figures(read_records(folder / "run" / "metrics.jsonl")).items():
        (folder / "figures" / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
