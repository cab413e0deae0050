"""The `lt` command as people and schedulers meet it: listing, exit codes, messages."""

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest

from lt_launch import catalog, command
from lt_launch.__main__ import main
from lt_launch.catalog import installed_commands, installed_packages

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def test_help_lists_every_installed_command_without_importing_any(run_lt: Run) -> None:
    done = run_lt("--help")
    assert done.returncode == 0
    assert done.stderr == ""
    assert done.stdout.startswith("Usage: lt COMMAND [ARGS]...\n")
    rows = done.stdout.partition("Commands:\n")[2].partition("\n\n")[0].splitlines()
    assert [row.split()[0] for row in rows] == sorted({*(e.name for e in entry_points(group="lt.commands")), "demo"})
    described = {row.split()[0]: row.split(maxsplit=1)[1] for row in rows}
    assert described["demo"] == "A package from elsewhere"
    assert all(described[name] == known.help for name, known in catalog.COMMANDS.items() if name in described)
    assert run_lt("-h").stdout == done.stdout


def test_a_command_is_imported_when_it_is_called_and_named_after_its_entry_point(run_lt: Run) -> None:
    done = run_lt("demo", "echo", "hello", "--loud")
    assert (done.returncode, done.stdout, done.stderr) == (0, "HELLO\n", "demo_cli was imported\n")
    assert run_lt("demo", "--help").stdout.startswith("Usage: lt demo [OPTIONS] COMMAND [ARGS]...\n")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["demo", "mistake"], 64, "error: demo.width = 3: must be even; use 2 or 4\n"),
        (["demo", "requeue"], 75, ""),
        (["demo", "leave", "0"], 0, ""),
        (["demo", "leave", "75"], 75, ""),
        (
            ["demo", "needs-extra"],
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
    assert done.returncode == code
    assert done.stderr.removeprefix("demo_cli was imported\n") == message
    assert done.stdout == ""


def test_an_interrupted_command_ends_with_130(run_lt: Run) -> None:
    done = run_lt("demo", "interrupt")
    assert done.returncode == 130
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("name", "last_line"),
    [
        ("bug", "RuntimeError: broken invariant"),
        ("plain-value-error", "ValueError: not meant for people"),
        ("needs-ghost", "ModuleNotFoundError: No module named 'surely_missing_ghost'"),
    ],
)
def test_our_mistakes_show_their_traceback_and_end_with_70(run_lt: Run, name: str, last_line: str) -> None:
    done = run_lt("demo", name)
    assert done.returncode == 70
    assert "Traceback (most recent call last)" in done.stderr
    assert done.stderr.splitlines()[-1] == last_line


def test_version_lists_the_installed_packages(run_lt: Run) -> None:
    done = run_lt("--version")
    assert done.returncode == 0
    assert done.stdout.splitlines() == [f"{name} {found}" for name, found in installed_packages().items()]
    assert f"lt-launch {version('lt-launch')}" in done.stdout.splitlines()


def test_lt_alone_shows_the_help_and_is_a_usage_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["lt"])
    assert main() == 64
    assert capsys.readouterr().err == f"error: lt needs a command\n\n{command.help_text()}\n"


def test_an_error_cannot_change_the_terminal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["launch", "run", str(tmp_path / "no\x1b[31m.toml")]) == 64
    shown = capsys.readouterr().err
    assert r"no\x1b[31m.toml" in shown
    assert all(line.isprintable() for line in shown.splitlines())


def test_help_with_nothing_installed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "installed_commands", dict)
    assert "  none is installed: pip install 'lt-trainer[quickstart]' lt-trainer-gpu\n" in command.help_text()


@pytest.mark.parametrize("name", sorted(catalog.COMMANDS))
def test_a_command_of_lt_that_is_not_installed_says_what_to_install(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "installed_commands", dict)
    assert main([name]) == 64
    install = catalog.COMMANDS[name].install
    assert capsys.readouterr().err == f"error: lt {name} is not installed here: pip install '{install}'\n"


def test_the_catalog_agrees_with_the_installed_packages() -> None:
    for name, entry in installed_commands().items():
        if catalog.package_name(entry) in catalog.PACKAGES:
            assert catalog.COMMANDS[name].install.partition("[")[0] == catalog.package_name(entry)


@pytest.mark.skipif("data" not in installed_commands(), reason="needs lt-data")
def test_without_typer_the_install_line_is_printed() -> None:
    program = "import sys; sys.modules['typer'] = None; from lt_launch.__main__ import main; sys.exit(main(['data']))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr == "lt data: the command needs typer: pip install 'lt-data[cli]'\n"
    assert done.returncode == 64
