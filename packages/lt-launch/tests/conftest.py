"""A made-up package that offers a command, and a way to run `lt` in a fresh interpreter."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

CLI = '''
import sys
import typer

sys.stderr.write("demo_cli was imported\\n")
app = typer.Typer(name="demo", no_args_is_help=True, help="Demonstrate.")


class DemoError(ValueError):
    exit_code = 64


@app.command()
def mistake() -> None:
    """Something to mend."""
    raise DemoError("demo.width = 3: must be even; use 2 or 4")


@app.command()
def bug() -> None:
    """Not for the person to mend."""
    raise RuntimeError("broken invariant")


@app.command()
def plain_value_error() -> None:
    """A ValueError of nobody's."""
    raise ValueError("not meant for people")


@app.command()
def requeue() -> None:
    """Stopped and saved."""
    raise typer.Exit(75)


@app.command()
def leave(code: int) -> None:
    """Leave as a library might."""
    sys.exit(code)


@app.command()
def interrupt() -> None:
    """Ctrl-C."""
    raise KeyboardInterrupt


@app.command()
def needs_extra() -> None:
    """Needs what the extra 'plot' brings."""
    import surely_missing_plot.figures


@app.command()
def needs_ghost() -> None:
    """Needs what no extra brings."""
    import surely_missing_ghost


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
def demo_path(tmp_path: Path) -> Path:
    """A folder that, on PYTHONPATH, is an installed package demo-tools with the command `demo`."""
    (tmp_path / "demo_cli.py").write_text(CLI)
    info = tmp_path / "demo_tools-1.2.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA)
    (info / "entry_points.txt").write_text("[lt.commands]\ndemo = demo_cli:app\n")
    return tmp_path


@pytest.fixture
def run_lt(demo_path: Path) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """Run `lt` with arguments in a fresh interpreter that also has demo-tools."""

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        environ = {**os.environ, "PYTHONPATH": str(demo_path), "COLUMNS": "100", "NO_COLOR": "1"}
        command = [sys.executable, "-m", "lt_launch", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environ, check=False)

    return run


@pytest.fixture(autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads the profile of whoever runs it, or adds to their list of launches."""
    home = tmp_path_factory.mktemp("home")
    (home / "profile.toml").touch()
    monkeypatch.setenv("LT_LAUNCH_HOME", str(home))
    monkeypatch.setenv("LT_LAUNCH_PROFILE", str(home / "profile.toml"))
    return home


@pytest.fixture(scope="session")
def tiny_recipe() -> Callable[..., str]:
    """Text of a recipe that trains in seconds on CPUs, with further fields by their dotted names."""
    model = {"hidden_size": 32, "intermediate_size": 64, "n_heads": 2, "n_kv_heads": 1, "n_layers": 1}
    base = {f"model.{name}": value for name, value in model.items()} | {"model.tie_word_embeddings": True}
    base |= {"data.seq_len": 64, "batch.global_batch_size": 8, "batch.micro_batch_size": 2, "optimizer.lr": 3e-3}
    base |= {"schedule.warmup_steps": 3, "schedule.min_lr": 3e-4, "checkpoint.interval": 5, "metrics.log_interval": 1}
    base |= {"engine.gpu.device": "cpu", "engine.gpu.dtype": "float32"}

    def make(fields: dict[str, object]) -> str:
        return "".join(f"{name} = {json.dumps(value)}\n" for name, value in {**base, **fields}.items())

    return make
