"""Every command in a guide or a README is one that there is, with options that it has; those that can be run here are.

The command line itself is asked, in this process: no help text is parsed.
"""

import re
import shlex
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/*/README.md"), *ROOT.glob("examples/**/*.md")]
)
COMMAND = re.compile(r"^(?:    |\$ )?(?:[A-Z_]+=\S+ )*(?:uv run )?((?:lt|lt-data|lt-model|lt-ckpt|lt-train) [a-z].*)$")
APPS = {
    "lt-data": "lt_data.cli",
    "lt-model": "lt_model.cli",
    "lt-ckpt": "lt_ckpt.cli",
    "lt-train": "lt_trainer.cli",
}


def commands(text: str) -> list[str]:
    """The commands in a page's blocks (fenced or indented), each on one line, without what follows a comment sign."""
    found, fenced = [], False
    lines = iter(re.sub(r"\s*\\\n\s*", " ", text).splitlines())
    for line in lines:
        if line.lstrip().startswith("```"):
            fenced = not fenced
        match = COMMAND.match(line) if fenced or line.startswith("    ") else None
        if match:
            found.append(re.split(r"\s+#|\s{3,}|\s+[|>&]", match[1].strip())[0].strip())
    return found


CASES = sorted({(path.relative_to(ROOT).as_posix(), line) for path in PAGES for line in commands(path.read_text())})


@cache
def program(words: tuple[str, ...]) -> Any:
    """The click command of a program, or of `lt` and the command that follows it."""
    from importlib import import_module

    from typer.main import get_command

    if words[0] == "lt":
        from lt_launch.command import find

        loaded = find(words[1]).load()
    else:
        loaded = import_module(APPS[words[0]]).app
    return get_command(loaded) if hasattr(loaded, "registered_commands") else loaded


def test_pages_have_commands() -> None:
    assert len(CASES) > 60
    assert commands(
        "    lt data pack store \\\n        --seq-len 4 # so\n\ntext lt data x\n```\nlt train run a.toml\n```\n"
    ) == [
        "lt data pack store --seq-len 4",
        "lt train run a.toml",
    ]


@pytest.mark.parametrize(("page", "line"), CASES, ids=[f"{page}: {line}"[:90] for page, line in CASES])
def test_the_command_and_its_options_exist(page: str, line: str) -> None:
    words = shlex.split(line.replace("[", " ").replace("]", " ").replace("...", " "))
    own = 2 if words[0] == "lt" else 1
    command, rest = program(tuple(words[:own])), words[own:]
    while rest and not rest[0].startswith("-") and hasattr(command, "get_command"):
        found = command.get_command(None, rest[0])
        assert found is not None, f"{page}: `{line}`: no command {rest[0]!r}"
        command, rest = found, rest[1:]
    if "--" in rest:
        rest = rest[: rest.index("--")]
    known = {option for one in command.params for option in (*one.opts, *one.secondary_opts)} | {"--help"}
    for word in rest:
        if re.match(r"--[a-z]", word):
            assert word.split("=")[0] in known, f"{page}: `{line}`: no option {word}"


def test_the_run_by_hand_of_the_readme_runs(prepared: Path, lt: Callable[..., str], tmp_path: Path) -> None:
    """The block of the README from text to a model, line by line; only sizes are made small."""
    text = (ROOT / "README.md").read_text()
    block = text[text.index("## A run by hand") :]
    block = block[: block.index("where the smallest")]
    (tmp_path / "run.toml").write_text(
        (prepared / "run.toml")
        .read_text()
        .replace(f'"{prepared}/train"', '"store"')
        .replace(f'validation = "{prepared}/validation"\n', "")
        .replace('out = "run"', 'out = "runs/run"')
        .replace("tie_word_embeddings = true", "tie_word_embeddings = true\nmax_position_embeddings = 256")
        .replace("max_steps = 20", "max_steps = 4")
        .replace("interval = 8", "interval = 2")
    )
    small = {"TEXT...": str(prepared / "text" / "train"), "32000": "320", "4096": "64", "100": "3"}
    lines = commands(block)
    assert len(lines) >= 10
    for line in lines:
        lt(*(small.get(word, word) for word in shlex.split(line)[1:]), cwd=tmp_path)
    assert (tmp_path / "report.html").exists()
    assert (tmp_path / "model" / "config.json").exists()
