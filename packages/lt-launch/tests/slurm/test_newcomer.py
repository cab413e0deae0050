"""What a newcomer does, with a cluster that answers."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TOOL = Path(__file__).parents[4] / "tools" / "newcomer.py"


@pytest.mark.slow
def test_the_things_that_a_newcomer_does(cluster: Any, tmp_path: Path) -> None:
    """In a fresh clone of the last commit."""
    command = [sys.executable, TOOL, "--out", tmp_path / "newcomer"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert "NOT DONE" not in done.stdout
