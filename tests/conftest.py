"""Text, a store and a small recipe for the tests that cross packages, all made through the command line."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lt_test_helpers.stores import make_stores

ENV = os.environ | {"OMP_NUM_THREADS": "1"}
"""One thread per process: with several ranks on few cores, more would only wait for each other."""


def command(*arguments: str | Path, cwd: Path, code: int = 0) -> str:
    """Run a command with this interpreter's environment; returns its output after checking the exit code."""
    done = subprocess.run([str(a) for a in arguments], cwd=cwd, env=ENV, capture_output=True, text=True, check=False)
    text = done.stdout + done.stderr
    assert done.returncode == code, f"{' '.join(map(str, arguments))}: exit code {done.returncode}\n{text}"
    return text


@pytest.fixture(scope="session")
def lt() -> Callable[..., str]:
    """The `lt` command of this environment."""
    program = Path(sys.executable).parent / "lt"

    def run(*arguments: str | Path, cwd: Path, code: int = 0) -> str:
        return command(program, *arguments, cwd=cwd, code=code)

    return run


@pytest.fixture(scope="session")
def torchrun() -> Callable[..., str]:
    """`torchrun` on this machine."""

    def run(ranks: int, *arguments: str | Path, cwd: Path, code: int = 0) -> str:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        return command(*launch, *arguments, cwd=cwd, code=code)

    return run


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text, tokenizer, packed stores and `run.toml`, as a person makes them by hand."""
    root = tmp_path_factory.mktemp("prepared")
    make_stores(root, {"train": 60, "validation": 6})
    (root / "run.toml").write_text(
        f"""
[run]
dir = "run"

[model]
hidden_size = 64
intermediate_size = 128
n_heads = 4
n_kv_heads = 2
n_layers = 2
tie_word_embeddings = true

[data]
store = "{root}/train"
validation = "{root}/validation"
seq_len = 64

[batch]
global_batch_size = 8
micro_batch_size = 2

[optimizer]
lr = 3e-3

[schedule]
max_steps = 20
warmup_steps = 3
min_lr = 3e-4

[checkpoint]
interval = 8

[metrics]
log_interval = 1

[engine.gpu]
device = "cpu"
dtype = "float32"
"""
    )
    return root
