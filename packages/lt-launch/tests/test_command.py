"""The `lt` command as people and schedulers meet it: listing, exit codes, messages, and what help loads."""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest

from lt_launch import command
from lt_launch.__main__ import main
from lt_launch.command import COMMANDS, PACKAGES, installed_commands, installed_packages, package_name

Run = Callable[..., "subprocess.CompletedProcess[str]"]
HEAVY = ("torch", "numpy", "boto3", "fsspec", "matplotlib", "rich", "tokenizers", "safetensors", "transformers")
CLI = '''
import sys
import typer

sys.stderr.write("demo_cli was imported\\n")
app = typer.Typer(name="demo", no_args_is_help=True, help="Demonstrate.")


class DemoError(ValueError):
    exit_code = 64


@app.command()
def end(how: str) -> None:
    """End in some way."""
    if how.isdigit():
        sys.exit(int(how))
    if how == "plot":
        import surely_missing_plot.figures
    if "ghost" in how:
        import missing_ghost
    if how == "interrupt":
        raise KeyboardInterrupt
    raise DemoError("demo.width = 3: must be even; use 2 or 4") if how == "mistake" else ValueError("broken invariant")


@app.command()
def echo(text: str, loud: bool = False) -> None:
    """Say something."""
    print(text.upper() if loud else text)
'''
METADATA = """Metadata-Version: 2.1
Name: demo-tools
Version: 1.2.3
Summary: A package from elsewhere
Requires-Dist: typer
Requires-Dist: surely-missing-plot>=3; extra == "plot"
Provides-Extra: plot
"""


@pytest.fixture
def run_lt(tmp_path: Path) -> Run:
    """Run `lt` in a fresh interpreter that also has a package demo-tools with the command `demo`."""
    (tmp_path / "demo_cli.py").write_text(CLI)
    info = tmp_path / "demo_tools-1.2.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA)
    (info / "entry_points.txt").write_text("[lt.commands]\ndemo = demo_cli:app\n")

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        environ = {**os.environ, "PYTHONPATH": str(tmp_path), "COLUMNS": "100", "NO_COLOR": "1"}
        words = [sys.executable, "-m", "lt_launch", *arguments]
        return subprocess.run(words, capture_output=True, text=True, env=environ, check=False)

    return run


def test_help_lists_every_installed_command_and_imports_the_one_that_is_called(run_lt: Run) -> None:
    done = run_lt("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Usage: lt COMMAND [ARGS]...\n")
    rows = done.stdout.partition("Commands:\n")[2].partition("\n\n")[0].splitlines()
    assert [row.split()[0] for row in rows] == sorted({*(e.name for e in entry_points(group="lt.commands")), "demo"})
    described = {row.split()[0]: row.split(maxsplit=1)[1] for row in rows}
    assert described["demo"] == "A package from elsewhere"
    assert all(described[name] == known[0] for name, known in COMMANDS.items() if name in described)
    done = run_lt("demo", "echo", "hello", "--loud")
    assert (done.returncode, done.stdout, done.stderr) == (0, "HELLO\n", "demo_cli was imported\n")
    assert run_lt("demo", "--help").stdout.startswith("Usage: lt demo [OPTIONS] COMMAND [ARGS]...\n")


def test_a_package_without_a_summary(run_lt: Run, tmp_path: Path) -> None:
    lines = [line for line in METADATA.splitlines() if not line.startswith("Summary")]
    (tmp_path / "demo_tools-1.2.3.dist-info" / "METADATA").write_text("\n".join(lines))
    assert "  demo        a command of demo-tools, which has no summary\n" in run_lt("--help").stdout


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() & installed_commands().keys()))
def test_summaries_are_whole(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    from typer.main import get_command

    group = get_command(installed_commands()[name].load())
    assert main([name, "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for subcommand in getattr(group, "list_commands", lambda _: [])(None):
        found = group.get_command(None, subcommand)
        summary = (found.help or "").strip().partition("\n")[0]
        assert f"{subcommand} {summary}" in shown


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["demo", "end", "mistake"], 64, "error: demo.width = 3: must be even; use 2 or 4\n"),
        (["demo", "end", "0"], 0, ""),
        (["demo", "end", "75"], 75, ""),
        (["demo", "end", "interrupt"], 130, ""),
        (
            ["demo", "end", "plot"],
            64,
            "lt demo: the command needs surely_missing_plot: pip install 'demo-tools[plot]'\n",
        ),
        (["deno"], 64, "error: lt deno: no such command; did you mean lt demo?\n"),
        (["zzzz"], 64, "error: lt zzzz: no such command; lt --help lists the commands\n"),
        (["--nonsense"], 64, "error: lt --nonsense: no such option; see lt --help\n"),
    ],
)
def test_endings_without_a_traceback(run_lt: Run, arguments: list[str], code: int, message: str) -> None:
    done = run_lt(*arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.removeprefix("demo_cli was imported\n") == message


@pytest.mark.parametrize(
    "how", ["ValueError: broken invariant", "ModuleNotFoundError: No module named 'missing_ghost'"]
)
def test_our_mistakes_show_their_traceback_and_end_with_70(run_lt: Run, how: str) -> None:
    done = run_lt("demo", "end", how)
    assert done.returncode == 70
    assert "Traceback (most recent call last)" in done.stderr
    assert done.stderr.splitlines()[-1] == how


def test_lt_alone_shows_the_help_and_is_a_usage_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["lt"])
    assert main() == 64
    assert capsys.readouterr().err == f"error: lt needs a command\n\n{command.help_text()}\n"
    assert main(["--version"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown == [f"{name} {found}" for name, found in installed_packages().items()]
    assert f"lt-launch {version('lt-launch')}" in shown


def test_what_is_not_installed_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, entry in installed_commands().items():
        assert package_name(entry) not in PACKAGES or COMMANDS[name][1].partition("[")[0] == package_name(entry)
    monkeypatch.setattr(command, "installed_commands", dict)
    assert "  none is installed: pip install 'lt-trainer[quickstart]' lt-trainer-gpu\n" in command.help_text()
    for name, (_, install) in COMMANDS.items():
        assert main([name]) == 64
        assert capsys.readouterr().err == f"error: lt {name} is not installed here: pip install '{install}'\n"


@pytest.mark.parametrize("name", ["", *sorted(COMMANDS.keys() & installed_commands().keys())])
def test_help_loads_the_commands_own_package_and_nothing_heavy(name: str, modules_of: Callable[..., set[str]]) -> None:
    modules = modules_of(*([name] if name else []), "--help")
    assert sorted(modules & set(HEAVY)) == []
    own = {COMMANDS[name][1].partition("[")[0].replace("-", "_")} if name else set()
    adding = {entry.value.partition(".")[0] for entry in entry_points(group=f"lt.commands.{name}")}
    app = {"lt_model"} if name not in ("", "data") else set()  # it has the app of all commands above it
    assert sorted(module for module in modules if module.startswith("lt_")) == sorted(
        {"lt_launch"} | app | own | adding
    )
