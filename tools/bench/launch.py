"""What `lt launch` costs: CPU seconds of help and of a render beside `import typer`, and what is installed, in bytes.

    uv run python tools/bench/launch.py [--rounds N] [--to docs/benchmarks/launch.md]

CPU seconds: `import typer` alone, help, and `lt launch render` of an example for each target, in turn, N times after
a first time that makes byte code; the median of the differences within a round, and the least beside the least.

Size: wheels of lt-launch and all that it stands on are built and installed with uv into two fresh environments,
lt-trainer into one, lt-launch[sagemaker] beside it into the other; what the files of the second take more than those
of the first, in bytes of content, no byte code. Needs a package index.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "examples" / "launch"
HELP_S, RENDER_S, INSTALLED_MB = 0.2, 0.4, 60
"""The bars: CPU seconds beyond `import typer`, and megabytes."""
RENDER = ["launch", "render"]
COMMANDS = {
    "`lt --help`": (HELP_S, ["--help"]),
    "`lt data --help`": (HELP_S, ["data", "--help"]),
    "render, local, a pipeline of seven stages": (RENDER_S, [*RENDER, "tiny.toml"]),
    "render, ssh, four hosts": (
        RENDER_S,
        [*RENDER, "llama-7b.toml", "--on", "ssh", "--hostfile", "hosts.txt", "--nproc-per-node", "8"],
    ),
    "render, slurm, a pipeline of eight stages": (RENDER_S, [*RENDER, "continued.toml", "--on", "slurm"]),
    "render, sagemaker, checked against the service model": (
        RENDER_S,
        [*RENDER, "litespark-sagemaker.toml", "--on", "sagemaker"],
    ),
    "render, k8s": (RENDER_S, [*RENDER, "smp-enroot.toml", "--on", "k8s"]),
}
"""The bar and the arguments, by what it is called."""
SMALL = ("lt-data", "lt-model", "lt-ckpt", "lt-trainer", "lt-launch")
ENGINES = ("lt-trainer-gpu", "lt-trainer-neuron")
"""Installed without torch, which a render does not import."""


def cpu_seconds(python: str, *words: str) -> float:
    """Of one fresh interpreter."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([python, *words], cwd=EXAMPLES, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (words, done.stderr[-2000:])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measured(python: str, rounds: int) -> tuple[list[float], list[float], dict[str, list[float]]]:
    """CPU seconds of `import typer`, of that and pydantic, and of each command, by round."""
    typer: list[float] = []
    pydantic: list[float] = []
    found: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(rounds + 1):
        typer.append(cpu_seconds(python, "-c", "import typer"))
        pydantic.append(cpu_seconds(python, "-c", "import typer, typer._adapters"))
        for name, (_, words) in COMMANDS.items():
            found[name].append(cpu_seconds(python, "-m", "lt_launch", *words))
    return typer[1:], pydantic[1:], {name: seconds[1:] for name, seconds in found.items()}


def install(base: Path) -> tuple[str, tuple[int, int, list[str]]]:
    """Two environments in `base`, lt-trainer's and one with lt-launch[sagemaker] beside it.

    Returns:
        The second one's python; bytes of the first, bytes of the second, and which packages the second adds.
    """
    for name in (*SMALL, *ENGINES):
        uv("build", "--wheel", "--package", name, "--out-dir", str(base / "wheels"), "-q")
    found = ["--find-links", str(base / "wheels")]
    sizes, names, python = [], [], ""
    for number, wanted in enumerate((["lt-trainer"], ["lt-trainer", "lt-launch[sagemaker]"])):
        env = base / f"env{number}"
        uv("venv", "-q", "--python", sys.executable, str(env))
        python = str(env / "bin" / "python")
        uv("pip", "install", "-q", "--python", python, *found, *wanted)
        files = [path for path in env.rglob("*") if path.is_file() and not path.is_symlink()]
        sizes.append(sum(path.stat().st_size for path in files))
        names.append(set(uv("pip", "freeze", "--python", python).splitlines()))
    uv("pip", "install", "-q", "--python", python, *found, "lt-launch[k8s]")
    uv("pip", "install", "-q", "--python", python, *found, "--no-deps", *ENGINES)
    return python, (sizes[0], sizes[1], sorted(line.partition(" @")[0] for line in names[1] - names[0]))


def uv(*words: str) -> str:
    """Run uv in the repository; what it printed."""
    return subprocess.run(["uv", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def beyond(typer: list[float], seconds: list[float]) -> tuple[float, float]:
    """Median of the differences by round, and the least of the one beside the least of the other."""
    each = [mine - base for mine, base in zip(seconds, typer, strict=True)]
    return statistics.median(each), min(seconds) - min(typer)


def page(
    typer: list[float], pydantic: list[float], found: dict[str, list[float]], sizes: tuple[int, int, list[str]]
) -> str:
    """The figures as Markdown."""
    rounds, middle = len(typer), statistics.median(typer)
    parsing, _ = beyond(typer, pydantic)
    versions = f"typer {version('typer')}, {next(line for line in sizes[2] if line.startswith('botocore'))}"
    rows = ""
    for name, seconds in found.items():
        median, least = beyond(typer, seconds)
        rows += f"| {name} | {statistics.median(seconds):.2f} | {median:.2f} | {least:.2f} | {COMMANDS[name][0]} |\n"
    first, second, names = sizes
    return f"""\
# Launching

Made by `uv run python tools/bench/launch.py --rounds {rounds} --to ...`, {datetime.date.today()}: {platform.machine()},
{os.cpu_count()} CPUs (load average {os.getloadavg()[0]:.0f}), Python {platform.python_version()}, {versions}.

## Commands

CPU seconds of a fresh process in an environment that holds lt-launch[sagemaker,k8s], lt-trainer and the engines without
torch; {rounds} rounds in turn. `import typer` alone takes {middle:.2f} (least {min(typer):.2f}),
the bars are beyond it. {parsing:.2f} of what a render takes is pydantic, which typer imports to parse an
option. Beside other work a CPU second does less, so the least of all rounds stands there, too.

| command | CPU s, median | beyond `import typer`, median | least | bar |
|---|---|---|---|---|
{rows}
## Installation

`lt-trainer` from wheels in a fresh environment: {first / 1e6:.1f} MB. With `lt-launch[sagemaker]` beside it:
{second / 1e6:.1f} MB, {(second - first) / 1e6:.1f} MB more (bar: {INSTALLED_MB} MB). It adds
{", ".join(names)}.
"""


def main() -> int:
    """Measure and print; 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--to", type=Path)
    given = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # as users have it: compiled in the round that is not counted
    with tempfile.TemporaryDirectory(prefix="lt-bench-launch-") as folder:
        python, sizes = install(Path(folder))
        typer, pydantic, found = measured(python, given.rounds)
    text = page(typer, pydantic, found, sizes)
    print(text)
    if given.to is not None:
        given.to.write_text(text, encoding="utf-8")
    slow = any(beyond(typer, seconds)[1] > COMMANDS[name][0] for name, seconds in found.items())
    return int(slow or sizes[1] - sizes[0] > INSTALLED_MB * 1e6)


if __name__ == "__main__":
    sys.exit(main())
