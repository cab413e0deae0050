"""What a run reports: records with a fixed order of fields, as `key=value` lines and as JSON lines, and its speed.

A line is made for people and for log scrapers: `step=10 loss=3.21 learning_rate=0.0016 ...`, six significant digits.
`METRIC_DEFINITIONS` holds the regular expressions with which SageMaker finds the six metrics of the Litespark algorithm
in such lines. JSON lines keep every digit; a number that is not finite is written as the string "nan", "inf" or "-inf",
since JSON has no other way that every reader takes.

Rates are per device: the whole run's count divided by its devices. A *batch* is a micro-batch, a *sample* a row of the
batch, a *token* a position of a row (padding included). MFU is flops_per_sec over the peak of one device, with the
FLOPs that the caller counts; which convention and which peak is the caller's to say beside it.

Cost: one line per logging step, flushed; no fsync.
"""

import dataclasses
import json
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lt_trainer.errors import RunDirError

__all__ = [
    "METRIC_DEFINITIONS",
    "JsonlSink",
    "LogFile",
    "MetricsRecord",
    "Rates",
    "Throughput",
    "ValidationRecord",
    "as_dict",
    "line",
    "read_jsonl",
]


@dataclass(frozen=True, kw_only=True)
class MetricsRecord:
    """The numbers of one logging step, in the order in which they are shown."""

    step: int
    """Updates done."""
    loss: float
    """Nats per token with a label, over the global batch."""
    learning_rate: float
    grad_norm: float
    """Before clipping."""
    batches_per_sec: float
    samples_per_sec: float
    tokens_per_sec: float
    flops_per_sec: float
    mfu: float
    """flops_per_sec over the peak of one device; nan where no peak is known."""
    memory_gib: float
    """Peak memory of one device since the last record, in GiB."""
    valid_tokens: int
    """Positions with a label in the global batch."""
    elapsed_s: float
    """Seconds since this process began to train."""


@dataclass(frozen=True, kw_only=True)
class ValidationRecord:
    """The loss over the whole validation set after `step` updates."""

    step: int
    val_loss: float
    """Nats per token with a label."""
    val_tokens: int
    """Positions with a label."""
    elapsed_s: float


NUMBER = r"([-+]?(?:[0-9][0-9.]*(?:[eE][-+]?[0-9]+)?|nan|inf))"

METRIC_DEFINITIONS: tuple[dict[str, str], ...] = tuple(
    {"Name": name, "Regex": rf"(?:^|\s){name}={NUMBER}"}
    for name in ("batches_per_sec", "flops_per_sec", "loss", "samples_per_sec", "mfu", "tokens_per_sec")
)
"""Names and regular expressions as SageMaker's CreateTrainingJob and CreateAlgorithm take them."""


def as_dict(record: Any) -> dict[str, Any]:
    """A record (dataclass or mapping) as a dict of plain values, in order."""
    return dict(record) if isinstance(record, Mapping) else dataclasses.asdict(record)


def line(record: Any) -> str:
    """A record as one `key=value` line.

    Example:
        >>> line(ValidationRecord(step=20, val_loss=3.25, val_tokens=4096, elapsed_s=12.3456789))
        'step=20 val_loss=3.25 val_tokens=4096 elapsed_s=12.3457'
    """
    return " ".join(f"{name}={_short(value)}" for name, value in as_dict(record).items())


def _short(value: Any) -> str:
    return format(value, ".6g") if isinstance(value, float) else str(value)


class LogFile:
    """A file that is appended to, unbuffered: what a full disk did not take is not tried again when it is closed.

    Raises:
        RunDirError: the file cannot be opened or written, for example because the disk is full.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by close()
        except OSError as exc:
            raise _cannot("open", path, exc) from exc

    def write(self, text: str) -> None:
        """Append text."""
        data = memoryview(text.encode("utf-8", errors="backslashreplace"))
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as exc:
            raise _cannot("write", self.path, exc) from exc

    def close(self) -> None:
        """Close the file."""
        try:
            self._file.close()
        except OSError as exc:
            raise _cannot("write", self.path, exc) from exc


class JsonlSink:
    """One JSON object per line, appended to a file; a line that an earlier process left unfinished is cut off first.

    Raises:
        RunDirError: the file cannot be opened or written, for example because the disk is full.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            _cut_unfinished_line(self.path)
        except OSError as exc:
            raise _cannot("open", self.path, exc) from exc
        self._file = LogFile(self.path)

    def write(self, record: Any) -> None:
        """Append one object."""
        text = json.dumps({name: _json_value(value) for name, value in as_dict(record).items()}, allow_nan=False)
        self._file.write(text + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> "JsonlSink":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _cannot(action: str, path: Path, exc: OSError) -> RunDirError:
    return RunDirError(f"cannot {action} {path}: {exc.strerror}; free space or mend its permissions, then start again")


def _cut_unfinished_line(path: Path) -> None:
    """Cut off what follows the last newline: the torn line of a process that was killed while writing it."""
    if not path.exists():
        return
    with open(path, "r+b") as file:
        end = file.seek(0, 2)
        tail = b""
        while len(tail) < end and b"\n" not in tail:
            size = min(4096, end - len(tail))
            file.seek(end - len(tail) - size)
            tail = file.read(size) + tail
        keep = end - len(tail) + tail.rfind(b"\n") + 1
        if keep < end:
            file.truncate(keep)


def _json_value(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


NOT_FINITE = {text: float(text) for text in ("nan", "inf", "-inf")}


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file, with "nan", "inf" and "-inf" as numbers again.

    A last line without its newline is left out: its writer was stopped in the middle, or is still at it.

    Raises:
        RunDirError: the file cannot be read, or a finished line is not a JSON object.
    """
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as exc:
        raise RunDirError(f"cannot read {path}: {exc.strerror}; give the path of a run's JSON-lines file") from exc
    found = []
    for number, row in enumerate(text.split("\n")[:-1], start=1):
        try:
            values = json.loads(row)
        except ValueError as exc:
            raise RunDirError(f"{path}:{number}: not a JSON object ({exc}); remove the line") from exc
        if not isinstance(values, dict):
            raise RunDirError(f"{path}:{number}: not a JSON object; remove the line")
        found.append({name: NOT_FINITE.get(v, v) if isinstance(v, str) else v for name, v in values.items()})
    return found


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Speed per device and second; nan before any time was measured."""

    batches_per_sec: float
    samples_per_sec: float
    tokens_per_sec: float
    flops_per_sec: float
    mfu: float


class Throughput:
    """Rates over the last updates, from the counts of the whole run and a clock that can be paused.

    Args:
        devices: Devices of the run; rates are per device.
        peak_flops: FLOP/s that one device can do, for MFU; None or 0 = unknown.
        window: How many calls of `update` a rate looks back.
        clock: Seconds, only differences count.
    """

    def __init__(
        self,
        *,
        devices: int,
        peak_flops: float | None = None,
        window: int = 10,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        assert devices >= 1, devices
        assert window >= 1, window
        self._devices, self._peak, self._clock = devices, peak_flops or math.nan, clock
        self._counts = (0.0, 0.0, 0.0, 0.0)
        self._paused_at: float | None = None
        self._paused_s = 0.0
        self._points: deque[tuple[float, tuple[float, ...]]] = deque(maxlen=window + 1)
        self._points.append((self._now(), self._counts))

    def _now(self) -> float:
        """Seconds on the clock, without the pauses."""
        now = self._clock() if self._paused_at is None else self._paused_at
        return now - self._paused_s

    def pause(self) -> None:
        """What follows is not training (validation, a save) and does not count."""
        if self._paused_at is None:
            self._paused_at = self._clock()

    def proceed(self) -> None:
        """Training goes on."""
        if self._paused_at is not None:
            self._paused_s += self._clock() - self._paused_at
            self._paused_at = None

    def update(self, *, batches: float, samples: float, tokens: float, flops: float) -> None:
        """Count what the whole run has done since the last call, all devices together."""
        new = (batches, samples, tokens, flops)
        self._counts = tuple(old + more for old, more in zip(self._counts, new, strict=True))
        self._points.append((self._now(), self._counts))

    def rates(self) -> Rates:
        """The rates over the window that ends with the last `update`."""
        (start, before), (end, after) = self._points[0], self._points[-1]
        seconds = (end - start) * self._devices
        batches, samples, tokens, flops = (
            (now - then) / seconds if seconds > 0 else math.nan for then, now in zip(before, after, strict=True)
        )
        return Rates(
            batches_per_sec=batches,
            samples_per_sec=samples,
            tokens_per_sec=tokens,
            flops_per_sec=flops,
            mfu=flops / self._peak,
        )
