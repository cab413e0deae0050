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
@pytest.mark.guarantee("data-units")
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
    job = [tmp_path / "in", tmp_path / "tok", tmp_path / "store", KILLS, SEED]
    script = Path(__file__).with_name("ray_kills.py")
    command = [python, script, *map(str, job)]
    run = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=900, env=ENVIRONMENT)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.splitlines()[-1] == str(KILLS)
    assert contents(tmp_path / "store") == contents(tmp_path / "whole")
    lose_a_worker_at_each_attempt(python, tmp_path)


def lose_a_worker_at_each_attempt(python: Path, tmp_path: Path) -> None:
    """One file ends its worker whenever it is read: its unit is named, the others finish, and the next call ends."""
    (tmp_path / "lethal.py").write_text(
        "import os, pathlib\n"
        "def spare(record):\n"
        "    if 'lethal' in record['text'] and pathlib.Path('is-lethal').exists():\n"
        "        os.kill(os.getpid(), 9)\n"
        "    return record\n",
        encoding="utf-8",
    )
    (tmp_path / "is-lethal").touch()
    lines = "".join(f'{{"text": "lethal {number}"}}\n' for number in range(4000))
    (tmp_path / "in" / "12-lethal.jsonl").write_text(lines, encoding="utf-8")
    options = ["--unit-bytes", "80000", "--engine", "hf", "--ray", "local", "--workers", "3", "--map", "lethal:spare"]
    sources = [tmp_path / "in", "--tokenizer", tmp_path / "tok", "--out", tmp_path / "lethal-store"]
    command = list(map(str, [python, "-m", "lt_data", "prepare", *sources, *options]))
    run_in = {"cwd": tmp_path, "env": {**ENVIRONMENT, "PYTHONPATH": str(tmp_path)}, "timeout": 300}
    failed = subprocess.run(command, capture_output=True, encoding="utf-8", check=False, **run_in)
    assert failed.returncode == 64, failed.stderr[-2000:]
    message = " ".join(failed.stderr.split())
    assert re.search(
        r"\d of \d+ units failed, the others are finished; \d+-of-\d+: its worker was lost 10 times", message
    )
    finished = list((tmp_path / "lethal-store" / "units").glob("0*/manifest.json"))
    assert len(finished) > 5
    (tmp_path / "is-lethal").unlink()
    subprocess.run(command, check=True, capture_output=True, **run_in)
    assert (tmp_path / "lethal-store" / "manifest.json").exists()
