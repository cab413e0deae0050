"""How `lt data inspect` shows a step: a few lines per row, with the text on one line or whole.

What a document holds must not change the terminal or the lines around it: everything but printable characters is
written as an escape. Widths are those of a terminal's columns, so that a text in Chinese takes no more room.
"""

import unicodedata
from collections.abc import Iterator

from lt_data.errors import DataError
from lt_data.inspection import InspectedRow, Piece
from lt_data.run_files import StepReport

LEAST_COLUMNS = 40


def parse_rows(row: int | None, rows: str | None) -> range | None:
    """The rows that `--row I` or `--rows A:B` ask for; None for all.

    Raises:
        DataError: both are given, or `rows` is not two numbers.
    """
    if row is not None and rows is not None:
        raise DataError("--row and --rows: give one of the two")
    if row is not None:
        return range(row, row + 1)
    if rows is None:
        return None
    begin, colon, end = rows.partition(":")
    if not (colon and begin.isdecimal() and end.isdecimal() and int(begin) < int(end)):
        raise DataError(f"--rows {rows}: give two numbers A:B, A less than B, for the rows A to B - 1")
    return range(int(begin), int(end))


def step_lines(report: StepReport, *, columns: int, whole_text: bool = False) -> Iterator[str]:
    """The lines that show a step.

    Args:
        report: what to show.
        columns: of the terminal.
        whole_text: show the whole text of each piece, not only how it begins.
    """
    columns = max(columns, LEAST_COLUMNS)
    event, first = report.event, report.first_position
    if not report.recorded:
        yield (
            f"step {report.step} has not been run yet, as far as the run's files tell (the last step in them is "
            f"{report.last_recorded}); going on as it was last started, it would read:"
        )
    yield (
        f"step {report.step}: positions {first} to {first + event.global_batch - 1}, {event.global_batch} rows over "
        f"{event.dp_size} data-parallel rank{'' if event.dp_size == 1 else 's'}, seed {event.seed}"
    )
    yield f"store {report.store}: {event.fingerprint}"
    for row in report.rows:
        yield ""
        yield from _row_lines(row, columns, whole_text)


def _row_lines(row: InspectedRow, columns: int, whole_text: bool) -> Iterator[str]:
    padding = f", {row.padding} padding" if row.padding else ""
    yield (
        f"row {row.index}: position {row.position}, epoch {row.epoch}, pack row {row.row}, rank {row.rank}, "
        f"{row.labels} labels{padding}"
    )
    for piece in row.pieces:
        source = "" if piece.source is None else f" ({escape(piece.source)})"
        yield (
            f"  document {piece.document}{source}: tokens {piece.begin} to {piece.end - 1} of {piece.document_tokens}, "
            f"{_extent(piece)}, {piece.labels} labels"
        )
        if whole_text:
            yield from (f"    | {line}" for line in escape(piece.text, keep="\n\t\\").split("\n"))
        else:
            yield f"    {one_line(piece.text, columns - 4)}"


def _extent(piece: Piece) -> str:
    if piece.begins and piece.ends:
        return "whole"
    return "its beginning" if piece.begins else "its end" if piece.ends else "from its middle"


def one_line(text: str, columns: int) -> str:
    """A text in quotes on one line of at most `columns` columns (at least 5); `...` after it where it goes on."""
    room = columns - 2  # the quotes
    shown: list[tuple[str, int]] = []
    used = 0
    for character in text:
        part = '\\"' if character == '"' else escape(character)
        shown.append((part, sum(map(_columns, part))))
        used += shown[-1][1]
        if used > room:
            while used > room - 3:
                used -= shown.pop()[1]
            return f'"{"".join(part for part, _ in shown)}"...'
    return f'"{"".join(part for part, _ in shown)}"'


def escape(text: str, keep: str = "") -> str:
    r"""A text in which all but printable characters, and `\` too, are escapes such as `\n`; those to `keep` stay."""
    return "".join(
        character
        if character in keep or (character.isprintable() and character != "\\")
        else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def _columns(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
