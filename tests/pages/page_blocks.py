"""The blocks of a page that a reader would copy: commands and Python, fenced or indented, with what stands before them.

Markdown has no word for "indented, and meant for a shell", so a block without a language is told by its lines: a line
that begins with a program makes it commands, and one that Python parses and that imports or calls something is Python.
A comment `<!-- not run: REASON -->` as the last line before a block says that no test runs it, and why.
"""

from __future__ import annotations

import ast
import re
import shlex
import textwrap
from dataclasses import dataclass

LT_PROGRAMS = ("lt", "lt-data", "lt-model", "lt-ckpt", "lt-train")
OTHER_PROGRAMS = (
    "bash",
    "cd",
    "colossalai",
    "docker",
    "export",
    "git",
    "just",
    "kubectl",
    "mkdocs",
    "neuron-ls",
    "pip",
    "python",
)
OTHER_PROGRAMS += ("python3", "python3.11", "sbatch", "source", "srun", "tensorboard", "torchrun", "uv", "uvx")
PROGRAM_NAMES = "|".join(map(re.escape, (*LT_PROGRAMS, *OTHER_PROGRAMS)))
PROGRAM_LINE = re.compile(rf"(?:\$ )?(?:[A-Z_]+=\S* )*(?:uv run )?({PROGRAM_NAMES}) (?!= )")
NOT_RUN_COMMENT = re.compile(r"\s*<!-- not run:(.*)-->\s*")
SHELL_LANGUAGES = ("sh", "bash", "console", "shell")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block of a page.

    Attributes:
        line: its first line in the page, from 1.
        kind: "commands", "python", or the language of the fence, or "".
        text: what is in it, without its indentation.
        skip_reason: why it is not run; None where nothing says so.
    """

    line: int
    kind: str
    text: str
    skip_reason: str | None = None


def parse_blocks(text: str) -> list[Block]:
    """All blocks of a page, in order."""
    lines, found, at, told = text.splitlines(), [], 0, ""
    while at < len(lines):
        line = lines[at]
        end = at + 1
        if fence := re.match(r"\s*```(\w*)", line):
            while not lines[end].lstrip().startswith("```"):
                end += 1
            found.append(_block(at + 1, fence[1], lines[at + 1 : end], told))
            end, told = end + 1, ""
        elif line.startswith("    ") and not NOT_RUN_COMMENT.fullmatch(line) and (at == 0 or not lines[at - 1].strip()):
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
                if NOT_RUN_COMMENT.fullmatch(lines[end]) or lines[end].lstrip().startswith("```"):
                    break
                end += 1
            found.append(_block(at + 1, "", lines[at:end], told))
            told = ""
        elif line.strip():
            told = line
        at = end
    return found


def _block(line: int, language: str, lines: list[str], before: str) -> Block:
    text = textwrap.dedent("\n".join(lines)).rstrip() + "\n"
    marked = NOT_RUN_COMMENT.fullmatch(before)
    return Block(line=line, kind=_kind(language, text), text=text, skip_reason=marked and marked[1].strip())


def _kind(language: str, text: str) -> str:
    if language in SHELL_LANGUAGES:
        return "commands"
    if language:
        return language
    if any(PROGRAM_LINE.match(line) for line in text.splitlines()):
        return "commands"
    try:
        parts = list(ast.walk(ast.parse(text)))
    except SyntaxError:
        return ""
    return "python" if any(isinstance(part, ast.Call | ast.Import | ast.ImportFrom) for part in parts) else ""


def parse_commands(text: str) -> list[str]:
    """The commands of a block, each on one line, without what is said about them behind `#` or three spaces."""
    joined = re.sub(r"\s*\\\n\s*", " ", text)
    found = [re.split(r"(?:^|\s+)#|\s{3,}", line.strip())[0].strip() for line in joined.splitlines()]
    return [line.removeprefix("$ ").removeprefix("uv run ") for line in found if line]


def split_words(command: str) -> list[str]:
    """The words of a command; brackets around what may be left out are taken away, and what stands in them stays."""
    return [word for word in shlex.split(command.replace(" [", " ").replace("] ", " ").rstrip("]")) if word]
