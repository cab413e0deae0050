"""Progress output: a bar with time left on a terminal where rich is installed, else a plain line every 10 seconds."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec

from lt_data.display.terminal import escape_controls
from lt_data.progress import Progress

SECONDS_BETWEEN_LINES = 10.0
"""Of plain lines."""


@contextmanager
def progress_bar(label: str) -> Iterator[Progress]:
    """Provide a progress callback that prints to stderr.

    A label may name a file: it becomes one line that changes no terminal.
    """
    label = escape_controls(label, keep="")
    if sys.stderr.isatty() and find_spec("rich"):
        from rich.console import Console
        from rich.markup import escape
        from rich.progress import Progress as Bars

        with Bars(*Bars.get_default_columns(), "{task.fields[amount]}", console=Console(stderr=True)) as bars:
            task, began = bars.add_task(escape(label), total=None, amount=""), time.monotonic()

            def draw(done: int, total: int, unit: str) -> None:
                amount = format_amount(done, total, unit, time.monotonic() - began)
                bars.update(task, completed=done, total=total or None, amount=amount)

            yield draw
        return
    began = shown = time.monotonic()
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


@contextmanager
def sequential_progress_bars() -> Iterator[Callable[[str], Progress]]:
    """Provide progress callbacks for consecutive stages; a stage's bar ends when the next one's begins."""
    with ExitStack() as stack:

        def stage(label: str) -> Progress:
            bars: list[Progress] = []

            def report(done: int, total: int, unit: str) -> None:
                if not bars:
                    stack.close()
                    bars.append(stack.enter_context(progress_bar(label)))
                bars[0](done, total, unit)

            return report

        yield stage


def format_progress(done: int, total: int, unit: str, seconds: float) -> str:
    """Format a plain line: the amount, the rate, and about how many seconds are left."""
    left = f"about {seconds * (total - done) / done:.0f} s left" if 0 < done < total else f"{seconds:.0f} s"
    return f"{format_amount(done, total, unit, seconds)}, {left}"


def format_amount(done: int, total: int, unit: str, seconds: float) -> str:
    """Format an amount such as `12.3 of 40.0 M bytes, 3.1 M bytes/s`."""
    of = f" of {format_si(total)}" if total else ""
    return f"{format_si(done)}{of} {unit}, {format_si(done / seconds if seconds > 0 else 0.0)} {unit}/s"


def format_si(value: float) -> str:
    """Format a number with three digits and a decimal prefix: 999, 12.3 k, 4.56 M."""
    for factor, prefix in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= 0.9995 * factor:  # would be rounded to 1000 of the smaller prefix
            return f"{value / factor:.3g}{prefix}"
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"
