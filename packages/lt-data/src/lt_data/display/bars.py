"""Charts of a report as values: labeled bars.

The page draws them as SVG, report_png.py as PNG. Pure.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from lt_data.analysis.stats import PackStats, StoreStats
from lt_data.display.progress_bars import format_si


@dataclass(frozen=True, kw_only=True)
class Bar:
    """Bar of a chart: its label, its value as text, and its length as a fraction."""

    label: str
    value: str
    fraction: float


def length_bars(store_stats: StoreStats) -> Iterator[tuple[str, Bar, Bar]]:
    """Yield for each bin of lengths its name, and bars of its documents and tokens."""
    max_documents = max(bin.documents for bin in store_stats.length_histogram)
    max_tokens = max(bin.tokens for bin in store_stats.length_histogram)
    for bin in store_stats.length_histogram:
        name = (
            f"{bin.min_tokens:,}" if bin.min_tokens == bin.max_tokens else f"{bin.min_tokens:,} to {bin.max_tokens:,}"
        )
        documents, tokens = bin.documents / store_stats.documents, bin.tokens / store_stats.tokens
        yield (
            name,
            Bar(
                label="documents", value=f"{bin.documents:,} ({documents:.1%})", fraction=bin.documents / max_documents
            ),
            Bar(label="tokens", value=f"{format_si(bin.tokens)} ({tokens:.1%})", fraction=bin.tokens / max_tokens),
        )


def pack_bars(pack: PackStats) -> tuple[Bar, ...]:
    """Return bars of a pack's fill, padding and cut documents."""
    return (
        Bar(label="fill", value=f"{pack.fill_rate:.3%}", fraction=pack.fill_rate),
        Bar(label="padding", value=f"{pack.padding_rate:.3%}", fraction=pack.padding_rate),
        Bar(
            label="documents cut",
            value=f"{pack.truncated_documents:,} ({pack.truncation_rate:.2%})",
            fraction=pack.truncation_rate,
        ),
        Bar(
            label="of these needlessly",
            value=f"{pack.needlessly_truncated_documents:,} ({pack.needless_truncation_rate:.2%})",
            fraction=pack.needless_truncation_rate,
        ),
    )
