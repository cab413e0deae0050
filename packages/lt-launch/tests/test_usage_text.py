"""Words of a command line that are no command, option or argument are shown without what changes a terminal.

The text is typer's; a word may be the name of somebody's file, which a shell has put there (`lt data stats *`).
"""

import re

import pytest

from lt_launch.__main__ import main
from lt_test_helpers.hostile import COLOR, run_command

WORD = "\x1b]0;title\x07\x1b[31mred\x9b2J"
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@pytest.mark.parametrize(
    "words",
    [
        ["launch", "status", "x", WORD],
        ["launch", "status", f"--{WORD}"],
        ["launch", "logs", "x", "--rank", WORD],
        ["launch", WORD],
        ["model", "show", "tiny-2m", WORD],
        [WORD],
        [f"-{WORD}"],
    ],
)
def test_usage_errors_change_no_terminal(words: list[str]) -> None:
    if words[0] == "model":
        pytest.importorskip("lt_model")
    outcome = run_command(main, *words)
    assert outcome.code == 64
    assert "\x1b[31mred" not in outcome.err
    assert not CONTROLS.search(COLOR.sub("", outcome.err)), outcome.err
