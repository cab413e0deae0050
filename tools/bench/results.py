"""What every page of results says of the machine, and how a script replaces its own part of a page."""

from __future__ import annotations

import datetime
import os
import platform
from importlib.metadata import version
from pathlib import Path


def describe_machine(*packages: str) -> str:
    """Return date, processor, memory, load, and versions of Python and of packages."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return (
        f"{datetime.date.today()}, {names[0] if names else platform.machine()}, {os.cpu_count()} CPUs, "
        f"{memory / 2**30:.0f} GiB, load {os.getloadavg()[0]:.1f}. Python {platform.python_version()}"
        + "".join(f", {name} {version(name)}" for name in packages)
        + "."
    )


def format_table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = ["| " + " | ".join(line) + " |" for line in (head, *rows)]
    return [lines[0], "|" + "---|" * len(head), *lines[1:]]


def replace_part(page: Path, name: str, lines: list[str]) -> None:
    """Replace the lines between the marks `name` of a page, or append them with their marks."""
    begin, end = f"<!-- tools/bench/{name} -->", f"<!-- end of tools/bench/{name} -->"
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    after = rest.partition(end)[2] or "\n"
    page.write_text("\n".join([before.rstrip(), "", begin, "", *lines, "", end]) + after, encoding="utf-8")
