"""Progress output: a bar with rate and time left on a terminal, else a plain line every 10 seconds."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from lt_data.display.terminal import escape_controls
from lt_data.progress import Progress, no_progress

SECONDS_BETWEEN_LINES = 10.0
"""Of plain lines, where there is no terminal."""


@contextmanager
def progress_bar(label: str) -> Iterator[Progress]:
    """Provide a progress callback that prints to stderr.

    A label may name a file: it becomes one line that changes no terminal.
    """
    label = escape_controls(label, keep="")
    with _bar(label) if sys.stderr.isatty() else _lines(label) as report:
        yield report


@contextmanager
def sequential_progress_bars() -> Iterator[Callable[[str], Progress]]:
    """Provide progress callbacks for consecutive stages; a stage's bar ends when the next one's begins."""
    with ExitStack() as stack:
        shown = ""
        draw: Progress = no_progress

        def stage(label: str) -> Progress:
            def report(done: int, total: int, unit: str) -> None:
                nonlocal shown, draw
                if label != shown:
                    stack.close()
                    shown, draw = label, stack.enter_context(progress_bar(label))
                draw(done, total, unit)

            return report

        yield stage


@contextmanager
def _bar(label: str) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[amount]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    began = time.monotonic()
    with Bars(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task(label, total=None, amount="")

        def report(done: int, total: int, unit: str) -> None:
            amount = _amount(done, total, unit, time.monotonic() - began)
            bars.update(task, completed=done, total=total or None, amount=amount)

        yield report


@contextmanager
def _lines(label: str) -> Iterator[Progress]:
    began = time.monotonic()
    shown = began
    last = ""

    def report(done: int, total: int, unit: str) -> None:
        nonlocal shown, last
        now = time.monotonic()
        last = format_progress(done, total, unit, now - began)
        if now - shown >= SECONDS_BETWEEN_LINES:
            shown = now
            sys.stderr.write(f"{label}: {last}\n")
            last = ""

    yield report
    if last:
        sys.stderr.write(f"{label}: {last}\n")


def format_progress(done: int, total: int, unit: str, seconds: float) -> str:
    """Format a plain line: the amount, the rate, and about how many seconds are left."""
    return _amount(done, total, unit, seconds) + _format_time_left(done, total, seconds)


def _amount(done: int, total: int, unit: str, seconds: float) -> str:
    """Format an amount such as `12.3 of 40.0 M bytes, 3.1 M bytes/s`."""
    rate = done / seconds if seconds > 0 else 0.0
    of = f" of {format_si(total)}" if total else ""
    return f"{format_si(done)}{of} {unit}, {format_si(rate)} {unit}/s"


def _format_time_left(done: int, total: int, seconds: float) -> str:
    if not 0 < done < total:
        return f", {seconds:.0f} s"
    return f", about {seconds * (total - done) / done:.0f} s left"


def format_si(value: float) -> str:
    """Format a number with three digits and a decimal prefix: 999, 12.3 k, 4.56 M."""
    for factor, prefix in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= 0.9995 * factor:  # would be rounded to 1000 of the smaller prefix
            return f"{value / factor:.3g}{prefix}"
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"
