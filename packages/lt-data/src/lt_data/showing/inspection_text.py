"""How `lt data inspect` shows rows: a few lines per row, with the text on one line or whole.

Where a document begins and ends is said in words, and on a terminal with colours each document of a row has its own, in
a bar beside its text.

What a document holds must not change the terminal or the lines around it: everything but printable characters is
written as an escape. Widths are those of a terminal's columns, so that a text in Chinese takes no more room.
"""

import unicodedata
from collections.abc import Iterator, Sequence

from lt_data.errors import DataError
from lt_data.looking.inspection import InspectedRow, Piece
from lt_data.looking.run_files import StepReport
from lt_data.showing.colour import PLAIN, Paint

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


def step_lines(report: StepReport, *, columns: int, whole_text: bool = False, paint: Paint = PLAIN) -> Iterator[str]:
    """The lines that show a step.

    Args:
        report: what to show.
        columns: of the terminal.
        whole_text: show the whole text of each piece, not only how it begins.
        paint: colours, or none.
    """
    columns = max(columns, LEAST_COLUMNS)
    event, first = report.event, report.first_position
    if not report.recorded:
        yield (
            f"step {report.step} has not been run yet, as far as the run's files tell (the last step in them is "
            f"{report.last_recorded}); going on as it was last started, it would read:"
        )
    batch = event.global_batch if event.ramp is None else event.ramp.rows_of(report.step - 1)
    yield (
        f"step {report.step}: positions {first} to {first + batch - 1}, {report.batch_rows} rows over "
        f"{event.dp_size} data-parallel rank{'' if event.dp_size == 1 else 's'}, seed {event.seed}"
    )
    for name, folder in report.stores.items():
        yield f"store {folder}: {event.fingerprint}" if not name else f"store {folder}: source {name}"
    if "" not in report.stores:
        yield f"mixture: {event.fingerprint}"
    for row in report.rows:
        yield ""
        origin = f"{row.origin}, " if row.origin else ""
        place = (
            f"row {row.index}: position {row.position}, {origin}epoch {row.epoch}, pack row {row.row}, rank {row.rank}"
        )
        yield from _row_lines(row, place, columns, whole_text, paint)


def pack_lines(
    rows: Sequence[InspectedRow], *, columns: int, whole_text: bool = False, paint: Paint = PLAIN
) -> Iterator[str]:
    """The lines that show rows of a pack, in its own order; see `step_lines`."""
    columns = max(columns, LEAST_COLUMNS)
    for number, row in enumerate(rows):
        if number:
            yield ""
        yield from _row_lines(row, f"row {row.row}", columns, whole_text, paint)


def _row_lines(row: InspectedRow, place: str, columns: int, whole_text: bool, paint: Paint) -> Iterator[str]:
    padding = f", {row.padding} padding" if row.padding else ""
    yield paint.bold(f"{place}, {row.labels} labels{padding}")
    for number, piece in enumerate(row.pieces):
        source = "" if piece.source is None else f" ({escape(piece.source)})"
        head = (
            f"document {piece.document}{source}: tokens {piece.begin} to {piece.end - 1} of {piece.document_tokens}, "
            f"{_extent(piece)}, {piece.labels} labels"
        )
        yield f"  {paint.piece(number, head)}"
        if whole_text:
            bar = paint.piece(number, "|")
            yield from (f"    {bar} {line}" for line in escape(piece.text, keep="\n\t\\").split("\n"))
        elif paint.on:
            yield f"    {paint.piece(number, '|')} {one_line(piece.text, columns - 6)}"
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
