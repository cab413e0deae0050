"""The command line itself: what it loads, commands that engines add, and exit codes."""

import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from lt_trainer.__main__ import main
from lt_trainer.cli import commands


def test_help_loads_nothing_heavy() -> None:
    script = (
        "import sys\nfrom typer.main import get_command\nfrom lt_trainer.cli.commands import app\nget_command(app)\n"
        "print([m for m in ('torch', 'numpy', 'tokenizers', 'safetensors', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_engines_can_add_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    added = typer.Typer()

    @added.command()
    def polish(steps: int) -> None:
        typer.echo(f"polished for {steps} steps")

    def broken() -> None:
        raise AssertionError("a command that is only listed must not be imported")

    entries = [SimpleNamespace(name="polish", load=lambda: added), SimpleNamespace(name="other", load=broken)]
    monkeypatch.setattr(commands, "entry_points", lambda group: entries if group == "lt.commands.train" else [])
    assert CliRunner().invoke(commands.app, ["polish", "5"]).output == "polished for 5 steps\n"
    assert typer.main.get_command(commands.app).list_commands(None)[-3:] == ["sample", "other", "polish"]


def test_exit_codes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A mistake of the user is 64 in a line, one of ours 70 with a traceback."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # handlers of stop signals are set for a whole process
    for line, code in (
        ("--help", 0),
        ("nonsense", 64),
        ("run", 64),
        ("run x.toml --nonsense", 64),
        ("show x.toml", 64),
    ):
        monkeypatch.setattr(sys, "argv", ["lt-train", *line.split()])
        assert main() == code, line
        assert "Traceback" not in capsys.readouterr().err

    def broken(**_: str) -> None:
        raise ValueError("no exit_code: not addressed to the user \x1b[31m")

    monkeypatch.setattr(commands, "app", broken)
    assert main() == 70
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert r"to the user \x1b[31m" in shown.splitlines()[-1]
