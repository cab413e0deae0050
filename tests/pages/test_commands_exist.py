"""Every command in a guide or a README is one that there is, with options that it has, also where it is not run.

The command line itself is asked, in this process: no help text is parsed.
"""

import re
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from page_blocks import LT_PROGRAMS, parse_blocks, parse_commands, split_words

ROOT = Path(__file__).parents[2]
PATTERNS = ("*.md", "docs/**/*.md", "packages/*/README.md", "examples/**/*.md", "containers/*.md")
APPS = {
    "lt-data": "lt_data.cli",
    "lt-model": "lt_model.cli",
    "lt-ckpt": "lt_ckpt.cli",
    "lt-train": "lt_trainer.cli.commands",
}
CASES = sorted(
    {
        (path.relative_to(ROOT).as_posix(), re.split(r"\s+[|>&]", line)[0])
        for pattern in PATTERNS
        for path in ROOT.glob(pattern)
        for block in parse_blocks(path.read_text(encoding="utf-8"))
        if block.kind == "commands"
        for line in parse_commands(block.text)
        if line.split()[0] in LT_PROGRAMS and len(line.split()) > 1 and line.split()[1][0] != "-"
    }
)


@cache
def find_program(name: tuple[str, ...]) -> Any:
    """The click command of a program, or of `lt` and the command that follows it."""
    from typer.main import get_command

    if name[0] == "lt":
        from lt_launch.command import find_command

        loaded = find_command(name[1]).load()
    else:
        loaded = import_module(APPS[name[0]]).app
    return get_command(loaded) if hasattr(loaded, "registered_commands") else loaded


def test_pages_have_commands() -> None:
    assert len(CASES) > 90


@pytest.mark.parametrize(("page", "line"), CASES, ids=[f"{page}: {line}"[:90] for page, line in CASES])
def test_the_command_and_its_options_exist(page: str, line: str) -> None:
    given = split_words(line.replace("...", " "))
    own = 2 if given[0] == "lt" else 1
    command, rest = find_program(tuple(given[:own])), given[own:]
    while rest and not rest[0].startswith("-") and hasattr(command, "get_command"):
        found = command.get_command(None, rest[0])
        assert found is not None, f"{page}: `{line}`: no command {rest[0]!r}"
        command, rest = found, rest[1:]
    if "--" in rest:
        rest = rest[: rest.index("--")]
    known = {option for one in command.params for option in (*one.opts, *one.secondary_opts)} | {"--help"}
    for word in rest:
        if re.match(r"--?[a-z]", word):
            assert word.split("=")[0] in known, f"{page}: `{line}`: no option {word}"
