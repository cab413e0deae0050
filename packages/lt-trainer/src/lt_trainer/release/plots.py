"""Figures of a release, drawn from its own run/metrics.jsonl as SVG; needs Python alone.

    python plots.py          writes figures/*.svg beside this file

This file is in the release; the same log gives the same bytes. Steps that were repeated after a kill or a rollback are
drawn with their last values. Cost: one read of the log.
"""

import json
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 280, 76, 16, 34, 40
SERIES = (
    ("loss", "Training loss, nats per token", "loss", "val_loss", "linear"),
    ("learning-rate", "Learning rate", "learning_rate", "", "zero"),
    ("gradient-norm", "Gradient norm before clipping", "grad_norm", "", "log"),
    ("throughput", "Tokens per second", "tokens_per_sec", "", "zero"),
)
"""File, title, field of the line, field of the dots, scale; "log" is linear where values are not far apart."""
MIN_RATIO_OF_LOG = 20
COLORS = ("#2f6fbf", "#c2701c", "#3a8f5c", "#b0417a", "#7357c2", "#1f8f98")
N_TICKS = 5
MAX_MARKED = 30
"""A line of at most as many points has a dot at each."""
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
    for name, title, line_field, dot_field, scale in SERIES:
        line, dots = _points(records, line_field), _points(records, dot_field)
        if line:
            figures[f"{name}.svg"] = _figure(title, {"": _thin(line)}, dots, scale)
    tasks = sorted({str(record["eval_task"]) for record in records if "eval_acc" in record})
    lines = {task: _points([r for r in records if r.get("eval_task") == task], "eval_acc") for task in tasks}
    if lines := {task: points for task, points in lines.items() if points}:
        figures["tasks.svg"] = _figure("Accuracy of tasks", lines, [], "zero")
    return figures


def _points(records: Sequence[dict[str, Any]], field: str) -> list[Point]:
    values = ((record["step"], record[field]) for record in records if isinstance(record.get(field), int | float))
    return [(float(step), float(value)) for step, value in values if math.isfinite(value)]


def _thin(points: list[Point]) -> list[Point]:
    size = -(-len(points) // MAX_POINTS)
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [(group[-1][0], math.fsum(value for _, value in group) / len(group)) for group in groups]


def _figure(title: str, lines: dict[str, list[Point]], dots: list[Point], scale: str) -> str:
    points = [point for line in lines.values() for point in line] + dots
    xs, ys = zip(*points, strict=True)
    is_log = scale == "log" and min(ys) > 0 and max(ys) > MIN_RATIO_OF_LOG * min(ys)
    if is_log:
        y_ticks = [10.0**power for power in range(math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys))) + 1)]
    else:
        y_ticks = _ticks(min(ys) if scale != "zero" or min(ys) < 0 else 0.0, max(ys))
    x_ticks = [tick for tick in _ticks(min(xs), max(xs)) if min(xs) <= tick <= max(xs) and tick == int(tick)]
    x_low, x_high = min(xs), max(max(xs), min(xs) + 1)

    def height(y: float) -> float:
        low, high, y = (math.log(v) if is_log else v for v in (y_ticks[0], y_ticks[-1], y))
        return HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def place(point: Point) -> Point:
        return LEFT + (point[0] - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT), height(point[1])

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
        f'font-size="12" fill="#1c2330"><title>{title}</title><rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{title}{", validation as dots" if dots else ""}</text>',
    ]
    for y_tick in y_ticks:
        y = height(y_tick)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#dfe3ea"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{y_tick:.6g}</text>')
    for x_tick in x_ticks:
        x, _ = place((x_tick, y_ticks[0]))
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{x_tick:.0f}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">step</text>')
    left = WIDTH - RIGHT
    for i, (name, line) in reversed(list(enumerate(lines.items()))):
        color = COLORS[i % len(COLORS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, line))
        if len(line) > 1:
            parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        if len(line) <= MAX_MARKED:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in map(place, line)]
        if name and left > WIDTH // 3:
            parts.append(f'<text x="{left}" y="20" text-anchor="end" fill="{color}">{escape(name)}</text>')
            left -= 8 * len(name) + 12
    parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{COLORS[1]}"/>' for x, y in map(place, dots)]
    return "\n".join(parts) + "\n</svg>\n"


def _ticks(low: float, high: float) -> list[float]:
    """Return round numbers, the first not above `low` and the last not below `high`."""
    span = high - low or abs(high) or 1.0
    size = 10.0 ** math.floor(math.log10(span / N_TICKS))
    size *= next(factor for factor in (1, 2, 5, 10) if factor * size * N_TICKS >= span)
    first = math.floor(low / size)
    last = max(math.ceil(high / size), first + 1)
    return [float(f"{number * size:.12g}") for number in range(first, last + 1)]


def main() -> None:
    """Draw the figures of the release in this file's folder."""
    folder = Path(__file__).resolve().parent
    (folder / "figures").mkdir(exist_ok=True)
    for name, text in draw_figures(read_records(folder / "run" / "metrics.jsonl")).items():
        (folder / "figures" / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
