"""A home of its own for every test, what a command imports, and a small recipe."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads the profile of whoever runs it, or adds to their list of launches."""
    home = tmp_path_factory.mktemp("home")
    (home / "profile.toml").touch()
    monkeypatch.setenv("LT_LAUNCH_HOME", str(home))
    monkeypatch.setenv("LT_LAUNCH_PROFILE", str(home / "profile.toml"))
    return home


@pytest.fixture(scope="session")
def modules_of() -> Callable[..., set[str]]:
    """Return the packages that a command line of `lt` imports, which must succeed."""
    program = (
        "import json, sys\nfrom lt_launch.__main__ import main\ncode = main(sys.argv[1:])\n"
        "sys.stderr.write(json.dumps([code, sorted(sys.modules)]))"
    )

    def run(*arguments: str) -> set[str]:
        command = [sys.executable, "-c", program, *arguments]
        code, modules = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stderr)
        assert code == 0
        return {module.partition(".")[0] for module in modules}

    return run


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
