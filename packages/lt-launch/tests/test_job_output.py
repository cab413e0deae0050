r"""What a job prints, and words of a command line: no escape of them reaches the terminal."""

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lt_launch.__main__ import main
from lt_launch.job_output import format_lines
from lt_test_helpers.hostile import COLOR, run_command

PLAIN = "\\x1b]0;renamed\\x07title \\x1b[2Jgone red 10%"


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("step=1\tloss=2.5 Größe 東", "step=1\tloss=2.5 Größe 東"),
        ("\x1b[1;31mred\x1b[0m and \x1b[38;5;7mgrey\x1b[m", "red and grey"),
        ("10%\r20%\r30%\r", "30%"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\x9b31m\x08", "\\x9b31m\\x08"),
        ("a\u202eb", "a\\u202eb"),
        ("", ""),
    ],
)
def test_a_terminal_gets_plain_text_and_a_file_what_was_written(line: str, shown: str) -> None:
    assert format_lines(f"{line}\n\nb", Terminal(), "[1] ") == f"[1] {shown}\n[1] \n[1] b\n"
    assert format_lines(line, io.StringIO(), "# ") == f"# {line}\n"


def test_what_an_encoding_has_not_is_escaped() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    assert format_lines("東 é", stream) == "\\u6771 \\xe9\n"


def in_terminal(command: list[str], folder: Path) -> str:
    """Run a command in a terminal; what it wrote there."""
    main, terminal = pty.openpty()
    with subprocess.Popen(command, cwd=folder, stdin=terminal, stdout=terminal, stderr=terminal) as process:
        os.close(terminal)
        data = b""
        try:
            while piece := os.read(main, 1 << 16):
                data += piece
        except OSError:  # the other end is closed
            pass
    os.close(main)
    assert process.returncode == 0, data
    return data.decode().replace("\r\n", "\n")


def test_run_and_logs_in_a_terminal_and_in_a_pipe(tmp_path: Path) -> None:
    hostile = "\x1b]0;renamed\x07title \x1b[2Jgone \x1b[31mred\x1b[0m"
    program = f"import sys; sys.stdout.write({hostile + ' 10%' + chr(10) + '1%' + chr(13) + '9%' + chr(10)!r})"
    (tmp_path / "job.py").write_text(program)
    (tmp_path / "run.toml").write_text('[job]\nargv = ["python", "job.py"]\n')
    lt = [sys.executable, "-m", "lt_launch", "launch"]
    shown = in_terminal([*lt, "run", "run.toml", "--on", "local", "--out", "out"], tmp_path)
    assert f"{PLAIN}\n9%\n" in shown
    assert "\x1b]0;" not in shown
    assert in_terminal([*lt, "logs", "out"], tmp_path) == f"{PLAIN}\n9%\n"
    piped = subprocess.run([*lt, "logs", "out"], cwd=tmp_path, capture_output=True, check=True).stdout
    assert piped.decode() == f"{hostile} 10%\n1%\r9%\n"


WORD = "\x1b]0;title\x07\x1b[31mred\x9b2J"
"""May be the name of somebody's file, which a shell has put there (`lt data stats *`)."""


USAGE = (
    "launch status x WORD,launch status --WORD,launch logs x --rank WORD,launch run noWORD.toml,launch WORD,"
    "model show tiny-2m WORD,WORD,-WORD"
)


@pytest.mark.parametrize("text", USAGE.split(","))
def test_usage_errors_change_no_terminal(text: str) -> None:
    outcome = run_command(main, *(word.replace("WORD", WORD) for word in text.split()))
    assert outcome.code == 64
    assert "\x1b[31mred" not in outcome.err
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", COLOR.sub("", outcome.err)), outcome.err
