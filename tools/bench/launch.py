"""Cost of `lt launch`: CPU seconds of help and render relative to `import typer`, and installed bytes.

    uv run python tools/bench/launch.py [--rounds N] [--to docs/benchmarks/launch.md]

CPU seconds: `import typer` alone, help, and `lt launch render` of an example for each target, alternating, N times
after a first time that compiles byte code; the median of the differences within a round, and the difference of minima.
Size: wheels of lt-launch and its dependencies are built and installed with uv into two new environments, lt-trainer
into one, lt-launch[sagemaker] in addition into the other; the difference of their file contents in bytes, without byte
code. Needs a package index.
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
"""Limits: CPU seconds beyond `import typer`, and megabytes."""
RENDER_COMMAND = ["launch", "render"]
COMMANDS = {
    "`lt --help`": (HELP_S, ["--help"]),
    "`lt data --help`": (HELP_S, ["data", "--help"]),
    "render, local, a pipeline of seven stages": (RENDER_S, [*RENDER_COMMAND, "tiny.toml"]),
    "render, ssh, four hosts": (
        RENDER_S,
        [*RENDER_COMMAND, "llama-7b.toml", "--on", "ssh", "--hostfile", "hosts.txt", "--nproc-per-node", "8"],
    ),
    "render, slurm, a pipeline of eight stages": (RENDER_S, [*RENDER_COMMAND, "continued.toml", "--on", "slurm"]),
    "render, sagemaker, checked against the service model": (
        RENDER_S,
        [*RENDER_COMMAND, "litespark-sagemaker.toml", "--on", "sagemaker"],
    ),
    "render, k8s": (RENDER_S, [*RENDER_COMMAND, "smp-enroot.toml", "--on", "k8s"]),
}
"""Limit and arguments by label."""
BASE_PACKAGES = ("lt-data", "lt-model", "lt-ckpt", "lt-trainer", "lt-launch")
ENGINES = ("lt-trainer-gpu", "lt-trainer-neuron")
"""Installed without torch, which a render does not import."""


def cpu_seconds(python: str, *words: str) -> float:
    """Return the CPU seconds of one new interpreter."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([python, *words], cwd=EXAMPLES, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (words, done.stderr[-2000:])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure_cpu(python: str, rounds: int) -> tuple[list[float], list[float], dict[str, list[float]]]:
    """Return CPU seconds by round of `import typer`, of that with pydantic, and of each command."""
    typer: list[float] = []
    pydantic: list[float] = []
    found: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(rounds + 1):
        typer.append(cpu_seconds(python, "-c", "import typer"))
        pydantic.append(cpu_seconds(python, "-c", "import typer, typer._adapters"))
        for name, (_, words) in COMMANDS.items():
            found[name].append(cpu_seconds(python, "-m", "lt_launch", *words))
    return typer[1:], pydantic[1:], {name: seconds[1:] for name, seconds in found.items()}


def install_environments(base: Path) -> tuple[str, tuple[int, int, list[str]]]:
    """Create two environments in `base`: lt-trainer's, and one with lt-launch[sagemaker] in addition.

    Returns:
        Python of the second; bytes of the first, bytes of the second, and the packages that the second adds.
    """
    for name in (*BASE_PACKAGES, *ENGINES):
        run_uv("build", "--wheel", "--package", name, "--out-dir", str(base / "wheels"), "-q")
    found = ["--find-links", str(base / "wheels")]
    sizes, names, python = [], [], ""
    for number, wanted in enumerate((["lt-trainer"], ["lt-trainer", "lt-launch[sagemaker]"])):
        env = base / f"env{number}"
        run_uv("venv", "-q", "--python", sys.executable, str(env))
        python = str(env / "bin" / "python")
        run_uv("pip", "install", "-q", "--python", python, *found, *wanted)
        files = [path for path in env.rglob("*") if path.is_file() and not path.is_symlink()]
        sizes.append(sum(path.stat().st_size for path in files))
        names.append(set(run_uv("pip", "freeze", "--python", python).splitlines()))
    run_uv("pip", "install", "-q", "--python", python, *found, "lt-launch[k8s]")
    run_uv("pip", "install", "-q", "--python", python, *found, "--no-deps", *ENGINES)
    return python, (sizes[0], sizes[1], sorted(line.partition(" @")[0] for line in names[1] - names[0]))


def run_uv(*words: str) -> str:
    """Run uv in the repository; return its output."""
    return subprocess.run(["uv", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def overhead(typer: list[float], seconds: list[float]) -> tuple[float, float]:
    """Return the median of the differences by round, and the difference of the minima."""
    differences = [own - base for own, base in zip(seconds, typer, strict=True)]
    return statistics.median(differences), min(seconds) - min(typer)


def render_page(
    typer: list[float], pydantic: list[float], found: dict[str, list[float]], sizes: tuple[int, int, list[str]]
) -> str:
    """Return the results as Markdown."""
    rounds, typer_median = len(typer), statistics.median(typer)
    parsing, _ = overhead(typer, pydantic)
    versions = f"typer {version('typer')}, {next(line for line in sizes[2] if line.startswith('botocore'))}"
    rows = ""
    for name, seconds in found.items():
        median, least = overhead(typer, seconds)
        rows += f"| {name} | {statistics.median(seconds):.2f} | {median:.2f} | {least:.2f} |\n"
    first, second, names = sizes
    return f"""\
# Launching

Measured by `uv run python tools/bench/launch.py --rounds {rounds} --to ...`, {datetime.date.today()}:
{platform.machine()}, {os.cpu_count()} CPUs (load average {os.getloadavg()[0]:.0f}), Python
{platform.python_version()}, {versions}.

## Commands

CPU seconds of a fresh process in an environment with lt-launch[sagemaker,k8s], lt-trainer and the engines without
torch; {rounds} rounds, interleaved. `import typer` alone takes {typer_median:.2f} (minimum {min(typer):.2f}).
{parsing:.2f} of each render is pydantic, which typer imports to parse an option.

| command | CPU s, median | beyond `import typer`, median | minimum |
|---|---|---|---|
{rows}
## Installation

`lt-trainer` from wheels in a fresh environment: {first / 1e6:.1f} MB. With `lt-launch[sagemaker]` beside it:
{second / 1e6:.1f} MB, {(second - first) / 1e6:.1f} MB more. It adds
{", ".join(names)}.
"""


def main() -> int:
    """Measure and print; return 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--to", type=Path)
    options = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # compile modules in the uncounted round, as for users
    with tempfile.TemporaryDirectory(prefix="lt-bench-launch-") as folder:
        python, sizes = install_environments(Path(folder))
        typer, pydantic, found = measure_cpu(python, options.rounds)
    text = render_page(typer, pydantic, found, sizes)
    print(text)
    if options.to is not None:
        options.to.write_text(text, encoding="utf-8")
    slow = any(overhead(typer, seconds)[1] > COMMANDS[name][0] for name, seconds in found.items())
    return int(slow or sizes[1] - sizes[0] > INSTALLED_MB * 1e6)


if __name__ == "__main__":
    sys.exit(main())
