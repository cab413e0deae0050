"""`lt train report`: from run directories to the files of a report. All is made before the first byte is written."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from lt_trainer.errors import TrainerError
from lt_trainer.report.charts import charts, lanes, last_step, time_splits
from lt_trainer.report.page import page
from lt_trainer.report.reading import names_of, read_run


class ReportError(TrainerError):
    """A report that cannot be written."""


def write_report(
    runs: Sequence[str | Path], out: str | Path, *, png: str | Path | None = None, overwrite: bool = False
) -> tuple[Path, ...]:
    """Write a page about runs, and its charts as pictures.

    Args:
        runs: run directories; several are compared. Nothing in them is changed.
        out: the HTML file to write.
        png: folder for PNG files; needs matplotlib.
        overwrite: replace files that are there.

    Returns:
        The files written.

    Raises:
        ReportError: no run is given, or one twice; a file is there already, or the file system refuses.
        RunDirError: a folder is no run directory, or has a damaged file.
        TrainerError: matplotlib is missing.
    """
    paths = [Path(run) for run in runs]
    if not paths:
        raise ReportError("no run is given; name one run directory or more")
    twice = [path for path in paths if sum(other.resolve() == path.resolve() for other in paths) > 1]
    if twice:
        raise ReportError(f"{twice[0]}: the run is named twice; name each once")
    if png is not None:
        from lt_trainer.report.png import check_matplotlib

        check_matplotlib()
    histories = [read_run(path, name=name) for path, name in zip(paths, names_of(paths), strict=True)]
    made = {Path(out): page(histories).encode()}
    if png is not None:
        from lt_trainer.report.png import draw

        pictures = draw(
            charts(histories),
            time_splits(histories),
            lanes(histories),
            [one.name for one in histories],
            last_step(histories),
        )
        made |= {Path(png) / f"{name}.png": content for name, content in pictures.items()}
    for path in made:
        if path.exists() and not overwrite:
            raise ReportError(f"{path}: is there already; give another name, or --overwrite")
    for path, content in made.items():
        _replace(path, content)
    return tuple(made)


def _replace(path: Path, content: bytes) -> None:
    """Write a file so that it is there in full or not at all, also after a power cut."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as exc:
        raise ReportError(f"cannot write {path}: {exc.strerror}; name a folder that can be written") from exc
