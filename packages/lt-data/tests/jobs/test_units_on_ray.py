"""Units on a real Ray cluster of this machine that loses workers: the store of an undisturbed job, bit for bit.

Ray is in no environment of ours: uv makes one in a temporary folder.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lt_data import DataError, Tokenizer, prepare

KILLS = int(os.environ.get("LT_KILLS", "50"))
SEED = int(os.environ.get("LT_SEED", "23"))
PACKAGE = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
"""If `uv run` started pytest, Ray would repeat it for each worker, in another environment than that of this test."""


def test_without_ray(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    (tmp_path / "one.txt").write_text("some text", encoding="utf-8")
    with pytest.raises(DataError, match=r"ray is not installed: pip install \"lt-data\[ray\]\""):
        prepare([tmp_path / "one.txt"], tokenizer=tokenizer, out=tmp_path / "store", unit_bytes=100, ray="local")
    with pytest.raises(DataError, match="ray = 'local': has no effect without unit_bytes"):
        prepare([tmp_path / "one.txt"], tokenizer=tokenizer, out=tmp_path / "store", ray="local")


@pytest.mark.slow
def test_workers_of_a_cluster_are_killed(
    tmp_path: Path, tokenizer: Tokenizer, contents: Callable[[Path], dict[str, bytes]]
) -> None:
    if shutil.which("uv") is None:
        pytest.skip("uv, which makes the environment with ray, is not installed")
    python = tmp_path / "environment" / "bin" / "python"
    subprocess.run(["uv", "venv", "-q", "--python", sys.executable, tmp_path / "environment"], check=True)
    install = ["uv", "pip", "install", "-q", "--python", python, "psutil", "-e", f"{PACKAGE}[cli,ray]"]
    subprocess.run(install, check=True)
    tokenizer.save(tmp_path / "tok")
    (tmp_path / "in").mkdir()
    rng = np.random.default_rng(7)
    for number in range(40):
        texts = [" ".join(map(str, rng.integers(0, 10**9, int(n)))) for n in rng.integers(1, 200, 40)]
        texts += [f"in every file {i}" for i in range(9)]
        lines = "".join(f'{{"text": "{text}"}}\n' for text in texts)
        (tmp_path / f"in/{number:02d}.jsonl").write_text(lines, encoding="utf-8")
    sources = [tmp_path / "in", "--tokenizer", tmp_path / "tok", "--out", tmp_path / "whole"]
    whole = [
        python,
        "-m",
        "lt_data",
        "prepare",
        *sources,
        "--unit-bytes",
        "40000",
        "--engine",
        "hf",
        "--drop-duplicates",
    ]
    subprocess.run(list(map(str, whole)), check=True, capture_output=True)
    assert (tmp_path / "whole" / "kept.extents").exists()
    write_lethal_document(tmp_path)
    job = [tmp_path / "in", tmp_path / "tok", tmp_path / "store", KILLS, SEED]
    script = Path(__file__).with_name("ray_kills.py")
    command = list(map(str, [python, script, *job]))
    environment = {**ENVIRONMENT, "PYTHONPATH": str(tmp_path)}
    run = subprocess.run(
        command, capture_output=True, encoding="utf-8", timeout=900, check=False, env=environment, cwd=tmp_path
    )
    assert run.returncode == 0, run.stderr[-2000:]
    killed, message = run.stdout.splitlines()[-2:]
    assert killed == str(KILLS)
    assert contents(tmp_path / "store") == contents(tmp_path / "whole")
    assert re.search(r"1 of \d+ units failed, the others are finished; \S+: its worker was lost 10 times", message)
    assert (tmp_path / "lethal-store" / "manifest.json").exists()


def write_lethal_document(folder: Path) -> None:
    """Write a document, and a map that ends the process which reads it while there is a file `is-lethal`."""
    (folder / "lethal.py").write_text(
        "import os, pathlib\n"
        "def spare(record):\n"
        "    if record['text'] == 'lethal' and pathlib.Path(__file__).with_name('is-lethal').exists():\n"
        "        os.kill(os.getpid(), 9)\n"
        "    return record\n",
        encoding="utf-8",
    )
    (folder / "is-lethal").touch()
    (folder / "lethal.jsonl").write_text('{"text": "lethal"}\n', encoding="utf-8")
