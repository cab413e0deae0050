"""What a run shows on a terminal: an aligned line per logging interval below a header, and a moving line.

The moving line stands there during validation, a checkpoint or the first steps, which may compile.

Cost: a line per record; the moving line is drawn by a thread of rich, ten times a second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from lt_data.display.progress_bars import format_si
from lt_trainer.run_directory.jsonl import format_record

if TYPE_CHECKING:
    from rich.progress import Progress

HEADER_INTERVAL = 20
"""Lines of metrics between two headers."""
HEADER = f"{'step':>15} {'loss':>9} {'lr':>9} {'grad':>8} {'tokens/s':>9} {'MFU':>6} {'memory':>9} {'left':>9}"


class RunDisplay:
    """Terminal of a run; every method may raise OSError once that is closed.

    Args:
        last_step: Last step of the run.
    """

    def __init__(self, last_step: int) -> None:
        self._last_step, self._n_lines = last_step, 0
        self._moving: Progress | None = None
        """The line at the bottom, with one task."""

    def print(self, text: str) -> None:
        """Print a line, above the moving one if there is one."""
        if self._moving is None:
            print(text, flush=True)  # noqa: T201
        else:
            self._moving.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def print_record(self, record: Mapping[str, Any], seconds_left: float) -> None:
        """Print a record; with the metrics of a step the first steps are over."""
        if "loss" in record:
            self.stop_moving()
            if self._n_lines % HEADER_INTERVAL == 0:
                self.print(HEADER)
            self._n_lines += 1
            step = f"{record['step']:,}/{self._last_step:,}"
            if record["loss"] is None:
                self.print(f"{step:>15} no labels")
                return
            left = str(timedelta(seconds=round(seconds_left))) if math.isfinite(seconds_left) else ""
            self.print(
                f"{step:>15} {record['loss']:>9.4f} {record['learning_rate']:>9.2e} {record['grad_norm']:>8.3f} "
                f"{format_si(record['tokens_per_sec']):>9} {record['mfu']:>6.1%} {record['memory_gib']:>5.1f} GiB "
                f"{left:>9}" + (f"  experts {max(record['expert_load']):.2f}" if "expert_load" in record else "")
            )
        elif "val_loss" in record:
            name, bits = f"validation {record.get('val_set', '')}".rstrip(), record.get("val_bits_per_byte")
            more = "" if bits is None else f", {bits:.3f} bits per byte"
            self.print(f"{name:>15} {record['val_loss']:>9.4f}  perplexity {record['val_perplexity']:.4g}{more}")
        else:
            self.print(format_record(record))

    def start_moving(self, text: str) -> None:
        """Show a moving line with a text in place of the present one."""
        self.stop_moving()
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        text_column = TextColumn("{task.description}", markup=False)
        self._moving = Progress(SpinnerColumn(), text_column, BarColumn(), TimeElapsedColumn(), transient=True)
        # A rank that the watchdog ends would leave the terminal without a cursor.
        self._moving.console.show_cursor = lambda show=True: False
        self._moving.add_task(text, total=None)
        self._moving.start()

    def move(self, done: int, total: int, text: str) -> None:
        """Show how much is done in the moving line, if there is one."""
        if self._moving is not None:
            self._moving.update(self._moving.task_ids[0], completed=done, total=total, description=text)

    def stop_moving(self) -> None:
        """Remove the moving line, if there is one."""
        moving, self._moving = self._moving, None
        if moving is not None:
            moving.stop()
