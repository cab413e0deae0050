"""The real readers and writers, each in its own environment: tools/interop_exports.py."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[4] / "tools" / "interop_exports.py"
NOT_INSTALLED = 3


@pytest.mark.slow
@pytest.mark.parametrize("peer", ["megatron", "hf"])
def test_the_real_reader_finds_what_was_exported(peer):
    if shutil.which("uv") is None:
        pytest.skip("uv makes the environments of the readers, and it is not installed")
    done = subprocess.run([sys.executable, str(SCRIPT), peer], capture_output=True, text=True, check=False)
    if done.returncode == NOT_INSTALLED:
        pytest.skip(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    sys.stdout.write(done.stdout)
    for name in ("narrow", "wide"):
        assert f"): {name}: 400 documents" in done.stdout
        assert "of its writer imported" in done.stdout
