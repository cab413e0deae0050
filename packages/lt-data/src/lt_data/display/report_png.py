"""PNG charts of a report; the only module that imports matplotlib (extra `plot`).

Figures are drawn by the Agg renderer, without windows or global state. `lengths` shows documents and tokens by length,
`packs` the fill, padding and truncation of each pack.
"""

import io
from typing import TYPE_CHECKING

from lt_data.analysis.stats import StoreStats
from lt_data.display.progress_bars import format_si
from lt_data.errors import DataError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CHART_NAMES = ("lengths", "packs")
_BLUE, _ORANGE, _GRAY, _INK = "#2f6fbf", "#c2701c", "#8a94a6", "#1c2330"


def check_matplotlib() -> None:
    """Raise DataError if matplotlib is not installed."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise DataError('--png: matplotlib is not installed; pip install "lt-data[plot]"')


def render_charts(stats: StoreStats) -> dict[str, bytes]:
    """Return the charts: name → PNG."""
    return {"lengths": _png(_lengths(stats)), "packs": _png(_packs(stats))}


def _figure(rows: int, title: str) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, max(2.2, 0.32 * rows + 1.1)), dpi=150, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, color=_INK)
    return figure


def _lengths(stats: StoreStats) -> "Figure":
    names = [
        f"{bin.min_tokens:,}" if bin.min_tokens == bin.max_tokens else f"{bin.min_tokens:,} to {bin.max_tokens:,}"
        for bin in stats.length_histogram
    ]
    figure = _figure(len(names), "Length of documents, in tokens")
    left, right = figure.subplots(1, 2, sharey=True)
    documents, tokens = (
        [bin.documents for bin in stats.length_histogram],
        [bin.tokens for bin in stats.length_histogram],
    )
    for axes, values, total, color, title in (
        (left, documents, stats.documents, _BLUE, "documents"),
        (right, tokens, stats.tokens, _ORANGE, "tokens in them"),
    ):
        bars = axes.barh(range(len(values)), values, color=color, height=0.7)
        axes.bar_label(bars, [f"{format_si(n)} ({n / total:.1%})" for n in values], padding=3, fontsize=8, color=_INK)
        axes.set_title(title, loc="left", fontsize=10, color=_INK)
        axes.set_xlim(0, 1.45 * max(values))
        axes.set_xticks([])
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    left.set_yticks(range(len(names)), names, fontsize=8)
    left.invert_yaxis()
    return figure


def _packs(stats: StoreStats) -> "Figure":
    packs = stats.packs
    figure = _figure(3 * max(len(packs), 1), "Packs")
    axes = figure.subplots()
    if not packs:
        axes.text(0, 0.5, "This store has no pack yet.", color=_INK)
        axes.set_axis_off()
        return figure
    for shift, color, title, values in (
        (-0.27, _BLUE, "positions filled", [pack.fill_rate for pack in packs]),
        (0.0, _GRAY, "padding", [pack.padding_rate for pack in packs]),
        (0.27, _ORANGE, "documents cut", [pack.truncation_rate for pack in packs]),
    ):
        bars = axes.barh([number + shift for number in range(len(packs))], values, 0.25, color=color, label=title)
        axes.bar_label(bars, [f"{value:.2%}" for value in values], padding=3, fontsize=8, color=_INK)
    axes.set_yticks(range(len(packs)), [pack.name for pack in packs], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12)
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    figure.legend(loc="outside lower left", ncols=3, fontsize=8, frameon=False)
    return figure


def _png(figure: "Figure") -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
