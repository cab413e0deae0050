"""Report files from run directories; everything is rendered before the first file is written."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from lt_trainer.errors import TrainerError
from lt_trainer.files import write_atomic
from lt_trainer.observability.report.charts import build_charts, event_lanes, last_step, time_breakdowns
from lt_trainer.observability.report.page import report_html
from lt_trainer.observability.report.run_history import read_run, unique_names


class ReportError(TrainerError):
    """Report cannot be written."""


def write_report(
    runs: Sequence[str | Path], out: str | Path, *, png: str | Path | None = None, overwrite: bool = False
) -> tuple[Path, ...]:
    """Write the HTML report of one or more runs, and its charts as PNG files.

    Args:
        runs: run directories (only read); several are compared.
        out: HTML file.
        png: folder for PNG files; needs matplotlib.
        overwrite: overwrite existing files.

    Returns:
        The files written.

    Raises:
        ReportError: no run or a duplicate one; a file exists, or cannot be written.
        RunDirError: not a run directory, or a damaged file.
        TrainerError: matplotlib is not installed.
    """
    paths = [Path(run) for run in runs]
    if not paths:
        raise ReportError("no run directory given; pass at least one")
    real = [os.path.realpath(path) for path in paths]  # `Path.resolve` fails at a link to itself
    duplicates = [path for path, place in zip(paths, real, strict=True) if real.count(place) > 1]
    if duplicates:
        raise ReportError(f"{duplicates[0]}: duplicate run directory; pass each one once")
    if png is not None:
        from lt_trainer.observability.report.png import require_matplotlib

        require_matplotlib()
    histories = [read_run(path, name=name) for path, name in zip(paths, unique_names(paths), strict=True)]
    files = {Path(out): report_html(histories).encode("utf-8", "backslashreplace")}
    if png is not None:
        from lt_trainer.observability.report.png import draw_pictures

        pictures = draw_pictures(
            build_charts(histories),
            time_breakdowns(histories),
            event_lanes(histories),
            [history.name for history in histories],
            last_step(histories),
        )
        files |= {Path(png) / f"{name}.png": content for name, content in pictures.items()}
    for path in files:
        if path.exists() and not overwrite:
            raise ReportError(f"{path} exists; choose another name or pass --overwrite")
    for path, content in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, content)
        except OSError as exc:
            raise ReportError(f"cannot write {path}: {exc.strerror}; choose a writable folder") from exc
    return tuple(files)
