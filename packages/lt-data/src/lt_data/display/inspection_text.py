"""Text output of inspections: a few lines per row, with each document's text on one line or complete.

The text of a document must not change the terminal or the layout, so non-printable characters are escaped.
"""

import json
from collections.abc import Iterator

from lt_data.analysis.inspection import DocumentSpan, InspectedRow
from lt_data.display.terminal import escape_controls
from lt_data.errors import DataError

MIN_COLUMNS = 40


def parse_rows(row: int | None, rows: str | None) -> range | None:
    """Parse `--row I` or `--rows A:B`; None for all rows.

    Raises:
        DataError: both are given, or `rows` is not two numbers.
    """
    if row is not None and rows is not None:
        raise DataError("--row and --rows: give only one of them")
    if row is not None:
        return range(row, row + 1)
    if rows is None:
        return None
    begin, colon, end = rows.partition(":")
    if not (colon and begin.isdecimal() and end.isdecimal() and int(begin) < int(end)):
        raise DataError(f"--rows {rows}: give two numbers A:B, A less than B, for the rows A to B - 1")
    return range(int(begin), int(end))


def row_lines(row: InspectedRow, header: str, *, columns: int, full_text: bool = False) -> Iterator[str]:
    """Yield the lines of a row.

    Args:
        row: the row.
        header: what is said of it first.
        columns: columns of the terminal.
        full_text: show the complete text of each span, not only its beginning.
    """
    yield f"{header}, {row.labels} labels" + (f", {row.padding} padding" if row.padding else "")
    for span in row.spans:
        yield (
            f"  {_name(span)}: tokens {span.begin} to {span.end - 1} of {span.document_tokens}, {span.describe()}, "
            f"{span.labels} labels"
        )
        yield from (f"    {line}" for line in _content(span, max(columns, MIN_COLUMNS) - 4, full_text))


def document_lines(span: DocumentSpan, *, columns: int, full_text: bool = False) -> Iterator[str]:
    """Yield the lines of a whole document; see `row_lines`."""
    yield f"{_name(span)}: {span.document_tokens} tokens"
    yield from (f"  {line}" for line in _content(span, max(columns, MIN_COLUMNS) - 2, full_text))


def _name(span: DocumentSpan) -> str:
    return f"document {span.document}{'' if span.source is None else f' ({escape(span.source)})'}"


def _content(span: DocumentSpan, columns: int, full_text: bool) -> Iterator[str]:
    for name, value in span.columns.items():
        yield quote_line(f"{name} {value if isinstance(value, str) else json.dumps(value)}", columns)
    if full_text:
        yield from (f"| {line}" for line in escape_controls(span.text).split("\n"))
    else:
        yield f'"{quote_line(span.text, columns - 2)}"'


def quote_line(text: str, columns: int) -> str:
    """Return the beginning of a text on one line of at most `columns` characters, with `...` if truncated."""
    shown = escape(text[:columns])
    return shown if len(shown) <= columns and len(text) <= columns else f"{shown[: columns - 3]}..."


def escape(text: str) -> str:
    r"""Escape non-printable characters and `\`, such as `\n`, so that the text could be read back."""
    return escape_controls(text.replace("\\", r"\\"), keep="")
