"""Files and names as a stranger would make them, and what a command must do with them: refuse, in one line, at once.

A command runs in this process (`run_command`) or, in the slow set, in its own. `assert_refused` is the rule for all:
exit code 64, one line of error, no traceback, and no byte that changes a terminal. An alarm ends a command that waits,
for a pipe say; it decides nothing else.
"""

import contextlib
import ctypes
import io
import json
import os
import random
import re
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

ANSI = "\x1b]0;title\x07\x1b[31mred\x9b2J\u202egnp[bold]x[/]"
"""Text that sets a terminal's title and colors, is read backwards, and is markup of rich."""
HANG_S = 60
"""Seconds after which a command counts as waiting for something."""


class Hang(BaseException):
    """A command waits."""


@dataclass(frozen=True)
class Outcome:
    """What a command did."""

    code: object
    out: str
    err: str


@contextlib.contextmanager
def alarm(seconds: int = HANG_S) -> Iterator[None]:
    """Raise `Hang` where the block waits."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class _Stream(io.TextIOWrapper):
    """A terminal that stays readable after its program has reconfigured it."""

    def isatty(self) -> bool:
        return True


def run_command(main: Callable[[], object], *arguments: str | Path) -> Outcome:
    """Run a package's `__main__.main` with arguments, in this process, its outputs terminals."""
    raw = io.BytesIO(), io.BytesIO()
    streams = [_Stream(written, encoding="utf-8", errors="backslashreplace") for written in raw]
    before = sys.argv, sys.stdout, sys.stderr
    sys.argv = ["lt", *map(os.fspath, arguments)]
    sys.stdout, sys.stderr = streams
    try:
        with alarm():
            code = main()
    except SystemExit as exc:
        code = exc.code
    finally:
        sys.argv, sys.stdout, sys.stderr = before
    for stream in streams:
        stream.flush()
    out, err = (written.getvalue().decode("utf-8", "replace") for written in raw)
    return Outcome(code, out, err)


COLOR = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
"""Escapes that rich and our own colors write; none of them is in `ANSI` whole."""
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def assert_harmless(outcome: Outcome) -> None:
    """Assert that no traceback was printed, and nothing that changes a terminal."""
    for text in (outcome.out, outcome.err):
        assert "Traceback" not in text, text
        assert "\x1b[31mred" not in text, text
        plain = COLOR.sub("", text).replace("\r", "")
        found = CONTROL.search(plain)
        assert found is None, repr(plain[max(0, (found.start() if found else 0) - 80) :][:200])


def assert_refused(outcome: Outcome, codes: Sequence[int] = (64,)) -> None:
    """Assert that a command has refused what it was given, in one line of error."""
    assert_harmless(outcome)
    assert outcome.code in codes, (outcome.code, outcome.out, outcome.err)


def make_fifo(path: Path) -> None:
    """Make a pipe that nobody writes to."""
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    """Make a socket; its own path may be longer than a socket's may be."""
    with tempfile.TemporaryDirectory() as short, socket.socket(socket.AF_UNIX) as made:
        made.bind(f"{short}/s")
        os.rename(f"{short}/s", path) if os.stat(short).st_dev == os.stat(path.parent).st_dev else os.mkfifo(path)


def write(content: bytes | str) -> Callable[[Path], None]:
    """Return what writes a content."""
    return lambda path: path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8")) and None


@contextlib.contextmanager
def unusable_paths(folder: Path) -> Iterator[dict[str, Path]]:
    """Paths at which the first look is an error: a name too long, a folder that this process may not enter."""
    closed = folder / "closed"
    (closed / "inner").mkdir(parents=True)
    closed.chmod(0)
    try:
        with _without_rights_of_root():
            yield {"too long": folder / ("x" * 300), "closed": closed, "in a closed folder": closed / "inner"}
    finally:
        closed.chmod(0o700)


CAPABILITIES_VERSION = 0x20080522
ROOT_READS_ALL = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH


@contextlib.contextmanager
def _without_rights_of_root() -> Iterator[None]:
    """Give up in this thread the capabilities by which root enters every folder; where there are none, do nothing."""
    header, held = (ctypes.c_uint32 * 2)(CAPABILITIES_VERSION, 0), (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None, use_errno=True)
    if not sys.platform.startswith("linux") or libc.capget(header, held):
        yield
        return
    effective = held[0]
    held[0] = effective & ~ROOT_READS_ALL
    assert libc.capset(header, held) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        held[0] = effective
        assert libc.capset(header, held) == 0, os.strerror(ctypes.get_errno())


NESTED = "[" * 100_000 + "]" * 100_000
PLACES: dict[str, Callable[[Path], None]] = {
    "fifo": make_fifo,
    "socket": make_socket,
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "link to itself": lambda path: path.symlink_to(path),
    "directory": lambda path: path.mkdir(),
}
"""What may stand in the place of a file, by name."""
CONTENTS: dict[str, Callable[[Path], None]] = {
    "empty": write(b""),
    "binary": write(bytes(range(256)) * 8),
    "UTF-16": write("{}".encode("utf-16")),
    "nested lists": write(NESTED),
    "nested objects": write('{"a":' * 50_000 + "1" + "}" * 50_000),
    "nested less": write("[" * 400 + "]" * 400),
    "list": write("[]"),
    "number": write("3"),
    "text": write('"x"'),
    "null": write("null"),
    "object": write("{}"),
    "NaN": write('{"a": NaN, "b": Infinity}'),
    "long number": write('{"a": ' + "9" * 5000 + "}"),
    "duplicate keys": write('{"a": 1, "a": 2}'),
    "lone surrogate": write('{"\\ud800": "\\udfff"}'),
    "escapes": write(json.dumps({ANSI: ANSI})),
    "cut": write('{"a": [1, 2'),
}
"""What may stand in a file of JSON, by name."""
FEW = PLACES | {kind: CONTENTS[kind] for kind in ("empty", "binary", "nested lists")}
"""What a command gets whose reader of JSON others have been tried with."""

JUNK: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    2**31,
    2**63,
    10**400,
    1.5,
    float("nan"),
    float("inf"),
    5e-324,
    1.7e308,
    "",
    "x",
    "../../x",
    "/dev/full",
    ANSI,
    "a\x00b",
    "\ud800",
    [],
    {},
    [[]],
    [None],
    {"": None},
    {ANSI: [ANSI]},
)


def mutate(rng: random.Random, value: Any) -> Any:
    """Return a JSON value with one place changed: another value, one missing, one more, or one from elsewhere."""
    places = list(_places(value))
    if not places:
        return rng.choice(JUNK)
    path = rng.choice(places)
    copied = json.loads(json.dumps(value))
    holder = copied
    for key in path[:-1]:
        holder = holder[key]
    how = rng.choice(("junk", "junk", "junk", "drop", "add", "swap"))
    if how == "drop":
        del holder[path[-1]]
    elif how == "add" and isinstance(holder, dict):
        holder[rng.choice(("", "x", ANSI, "step", "\ud800"))] = rng.choice(JUNK)
    elif how == "swap":
        other = value
        for key in rng.choice(places):
            other = other[key]
        holder[path[-1]] = other
    else:
        holder[path[-1]] = rng.choice(JUNK)
    return copied


def _places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*at, key)
        yield from _places(inner, (*at, key))


def replace(path: Path, make: Callable[[Path], None]) -> None:
    """Put something else in the place of a file or link."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    make(path)
