"""HTML report of a store: the tables of `lt data stats`, with the lengths of documents as bars.

The page is one file that loads nothing and has no script. Every text from a store is escaped. The output is
reproducible. Cost: that of `stats`.
"""

import secrets
from collections.abc import Iterable
from html import escape
from pathlib import Path

from lt_data.analysis.stats import StoreStats
from lt_data.display.stats_text import PACK_HEADS, epoch_lines, pack_rows, store_facts
from lt_data.errors import DataError
from lt_data.storage import translate_os_errors, write_file

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "td,th{padding:.1rem .8rem .1rem 0;text-align:left;overflow-wrap:anywhere}meter{width:16rem}"
)


def write_report(stats: StoreStats, name: str, out: str | Path, *, overwrite: bool = False) -> None:
    """Write the statistics of a store as an HTML page.

    Args:
        stats: the statistics.
        name: name of the store, for the title.
        out: the file to write.
        overwrite: replace an existing file.

    Raises:
        DataError: the file exists already, or a file system error.
    """
    out = Path(out)
    if out.exists() and not overwrite:
        raise DataError(f"{out}: exists already; give another name, or --overwrite")
    with translate_os_errors("write", out):
        out.parent.mkdir(parents=True, exist_ok=True)
        tmp = out.with_name(f".{out.name}.{secrets.token_hex(4)}.tmp")  # no name that a link could wait at
        try:
            write_file(tmp, render_page(stats, name).encode("utf-8", "backslashreplace"))
            tmp.replace(out)
        finally:
            tmp.unlink(missing_ok=True)


def render_page(stats: StoreStats, name: str) -> str:
    """Return the HTML of the report."""
    most = max(one.documents for one in stats.length_histogram), max(one.tokens for one in stats.length_histogram)
    lengths = [
        (
            escape(f"{one.min_tokens:,} to {one.max_tokens:,}"),
            _bar(one.documents, most[0], stats.documents),
            _bar(one.tokens, most[1], stats.tokens),
        )
        for one in stats.length_histogram
    ]
    packs = [map(escape, row) for row in pack_rows(stats)]
    title = escape(f"{name}: token store")
    parts = [
        f"<h1>{title}</h1>",
        _table((), [map(escape, fact) for fact in store_facts(stats)]),
        "<h2>Length of documents</h2>",
        _table(("tokens", "documents", "tokens in them"), lengths),
        "<h2>Packs</h2>",
        _table(PACK_HEADS, packs) if packs else "<p>This store has no pack yet.</p>",
        *(f"<p>{escape(line)}</p>" for line in epoch_lines(stats)),
    ]
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        f"<!doctype html>\n<html lang=en><head><meta charset=utf-8>\n"
        f'<meta http-equiv=Content-Security-Policy content="{policy}">\n'
        f"<meta name=color-scheme content='light dark'><title>{title}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _bar(part: int, most: int, whole: int) -> str:
    return f"<meter max={most} value={part}></meter> {part:,} ({part / whole:.1%})"


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = ["".join(f"<th>{escape(head)}" for head in heads), *("<td>" + "<td>".join(row) for row in rows)]
    return "<table>\n" + "\n".join(f"<tr>{line}" for line in lines if line) + "\n</table>"
