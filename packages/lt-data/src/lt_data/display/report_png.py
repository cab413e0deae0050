"""PNG charts of a report, from the bars that its page shows; needs matplotlib (extra `plot`).

Figures are drawn by the Agg renderer, without windows or global state. `lengths` shows documents and tokens by length,
`packs` the fill, padding and cut documents of each pack.
"""

import io
from collections.abc import Sequence

from lt_data.analysis.stats import StoreStats
from lt_data.display.bars import Bar, length_bars, pack_bars
from lt_data.errors import DataError

CHART_NAMES = ("lengths", "packs")
_BLUE, _ORANGE, _GRAY, _INK = "#2f6fbf", "#c2701c", "#8a94a6", "#1c2330"


def check_matplotlib() -> None:
    """Raise DataError if matplotlib is not installed."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise DataError('--png: matplotlib is not installed; pip install "lt-data[plot]"')


def render_charts(stats: StoreStats) -> dict[str, bytes]:
    """Return the charts: name → PNG."""
    names, documents, tokens = zip(*length_bars(stats), strict=True)
    lengths = [("documents", names, documents, [_BLUE]), ("tokens in them", names, tokens, [_ORANGE])]
    bars = [(pack.name, bar) for pack in stats.packs for bar in pack_bars(pack)]
    labels = [f"{name}: {bar.label}" for name, bar in bars]
    packs = [("", labels, [bar for _, bar in bars], [_BLUE, _GRAY, _GRAY, _GRAY])]
    return {
        "lengths": _draw("Length of documents, in tokens", lengths),
        "packs": _draw("Packs" if bars else "This store has no pack yet.", packs),
    }


def _draw(title: str, columns: Sequence[tuple[str, Sequence[str], Sequence[Bar], Sequence[str]]]) -> bytes:
    """Draw columns of bars side by side: (title, labels, bars, colors in turn)."""
    from matplotlib.figure import Figure

    labels = columns[0][1]
    figure = Figure(figsize=(8, 0.32 * len(labels) + 1.1), dpi=150, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, color=_INK)
    rows = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    for axes, (name, _, bars, colors) in zip(rows, columns, strict=True):
        turns = [colors[number % len(colors)] for number in range(len(bars))]
        drawn = axes.barh(range(len(bars)), [bar.fraction for bar in bars], color=turns, height=0.7)
        axes.bar_label(drawn, [bar.value for bar in bars], padding=3, fontsize=8, color=_INK)
        axes.set_title(name, loc="left", fontsize=10, color=_INK)
        axes.set_xlim(0, 1.45)  # room for the values
        axes.set_xticks([])
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    rows[0].set_yticks(range(len(labels)), labels, fontsize=8)
    rows[0].invert_yaxis()
    if not labels:
        rows[0].set_axis_off()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
