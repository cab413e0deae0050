"""Text output of `lt data inspect`: a few lines per row, with the text on one line or complete.

On a terminal with colors each document of a row has its own color, in a bar beside its text.

The text of a document must not change the terminal or the layout, so non-printable characters are escaped. Widths are
terminal columns, so that Chinese text takes no more space.
"""

import json
import unicodedata
from collections.abc import Iterator, Sequence

from lt_data.analysis.inspection import DocumentSpan, InspectedRow
from lt_data.analysis.run_inspection import StepReport
from lt_data.display.color import NO_STYLE, AnsiStyle
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


def step_lines(
    report: StepReport, *, columns: int, full_text: bool = False, style: AnsiStyle = NO_STYLE
) -> Iterator[str]:
    """Yield the lines of a step report.

    Args:
        report: the report.
        columns: columns of the terminal.
        full_text: show the complete text of each span, not only its beginning.
        style: colors, or none.
    """
    columns = max(columns, MIN_COLUMNS)
    event, first = report.event, report.first_position
    if not report.recorded:
        yield (
            f"step {report.step} is not recorded in the run's files (their last step is {report.last_recorded}); if "
            "the run continues as it was last started, it would read:"
        )
    batch = event.global_batch_size if event.ramp is None else event.ramp.batch_size_at(report.step - 1)
    yield (
        f"step {report.step}: positions {first} to {first + batch - 1}, {report.batch_rows} rows over "
        f"{event.dp_size} data-parallel rank{'' if event.dp_size == 1 else 's'}, seed {event.seed}"
    )
    for name, folder in report.stores.items():
        rows = event.fingerprint if not name else f"source {name}"
        yield escape_controls(f"store {folder}: {rows}", keep="")
    if "" not in report.stores:
        yield escape_controls(f"mixture: {event.fingerprint}", keep="")
    for row in report.rows:
        yield ""
        origin = f"{escape_controls(row.origin, keep='')}, " if row.origin else ""
        header = (
            f"row {row.index}: position {row.position}, {origin}epoch {row.epoch}, pack row {row.row}, rank {row.rank}"
        )
        yield from _row_lines(row, header, columns, full_text, style)


def pack_lines(
    rows: Sequence[InspectedRow], *, columns: int, full_text: bool = False, style: AnsiStyle = NO_STYLE
) -> Iterator[str]:
    """Yield the lines of rows of a pack; see `step_lines`."""
    columns = max(columns, MIN_COLUMNS)
    for number, row in enumerate(rows):
        if number:
            yield ""
        yield from _row_lines(row, f"row {row.row}", columns, full_text, style)


def _row_lines(row: InspectedRow, header: str, columns: int, full_text: bool, style: AnsiStyle) -> Iterator[str]:
    padding = f", {row.padding} padding" if row.padding else ""
    yield style.bold(f"{header}, {row.labels} labels{padding}")
    for number, span in enumerate(row.spans):
        extent = (
            f"tokens {span.begin} to {span.end - 1} of {span.document_tokens}, {_describe_extent(span)}, "
            f"{span.labels} labels"
        )
        yield f"  {style.color_span(number, f'{_name_document(span)}: {extent}')}"
        yield from (f"    {line}" for line in _column_lines(span, columns - 4))
        yield from (f"    {line}" for line in _text_lines(span, number, columns - 4, full_text, style))


def span_lines(
    span: DocumentSpan, *, columns: int, full_text: bool = False, style: AnsiStyle = NO_STYLE
) -> Iterator[str]:
    """Yield the lines of a whole document; see `step_lines`."""
    yield style.bold(f"{_name_document(span)}: {span.document_tokens} tokens")
    yield from (f"  {line}" for line in _column_lines(span, max(columns, MIN_COLUMNS) - 2))
    yield from (f"  {line}" for line in _text_lines(span, 0, max(columns, MIN_COLUMNS) - 2, full_text, style))


def _column_lines(span: DocumentSpan, columns: int) -> Iterator[str]:
    for name, value in span.columns.items():
        shown = quote_line(value, max(columns - len(name) - 1, 5)) if isinstance(value, str) else json.dumps(value)
        yield f"{escape(name)} {shown}"


def _name_document(span: DocumentSpan) -> str:
    return f"document {span.document}{'' if span.source is None else f' ({escape(span.source)})'}"


def _text_lines(span: DocumentSpan, number: int, columns: int, full_text: bool, style: AnsiStyle) -> Iterator[str]:
    bar = style.color_span(number, "|")
    if full_text:
        yield from (f"{bar} {line}" for line in escape_controls(span.text).split("\n"))
    elif style.enabled:
        yield f"{bar} {quote_line(span.text, columns - 2)}"
    else:
        yield quote_line(span.text, columns)


def _describe_extent(span: DocumentSpan) -> str:
    if span.has_start and span.has_end:
        return "whole"
    return "its beginning" if span.has_start else "its end" if span.has_end else "from its middle"


def quote_line(text: str, columns: int) -> str:
    """Quote a text on one line of at most `columns` (at least 5) columns, with `...` if truncated."""
    max_width = columns - 2  # without the quotes
    shown: list[tuple[str, int]] = []
    used = 0
    for character in text:
        part = '\\"' if character == '"' else escape(character)
        shown.append((part, sum(map(_display_width, part))))
        used += shown[-1][1]
        if used > max_width:
            while used > max_width - 3:
                used -= shown.pop()[1]
            return f'"{"".join(part for part, _ in shown)}"...'
    return f'"{"".join(part for part, _ in shown)}"'


def escape(text: str) -> str:
    r"""Escape non-printable characters and `\`, such as `\n`, so that the text could be read back."""
    return escape_controls(text.replace("\\", r"\\"), keep="")


def _display_width(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
