"""Units of lt-data on an array of a real cluster whose elements are killed: the store of an undisturbed job."""

import os
import random
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from lt_data import Tokenizer, prepare
from lt_data.store.manifest import Selection
from lt_launch.slurm.target import SlurmTarget
from lt_launch.target import Launch

KILLS = int(os.environ.get("LT_KILLS", "50"))
SEED = int(os.environ.get("LT_SEED", "23"))
ELEMENTS = 8
UNIT_BYTES = 40_000
RUN_FILE = """
[pipeline]
name = "units-{round}"
[job]
restart = {{ max_restarts = 100 }}
[[stages]]
name = "prepare"
array = {elements}
argv = ["{python}", "-m", "lt_data", {words}]
"""


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def processes(cluster: Any, out: Path) -> list[psutil.Process]:
    """Processes that run the command of an element into a store; not what starts and watches it."""
    found = []
    for process in cluster.processes(LT_ARRAY_SIZE=str(ELEMENTS)):
        with suppress(psutil.NoSuchProcess):
            words = process.cmdline()
            found += [process] if words[1:3] == ["-m", "lt_data"] and str(out) in words else []
    return found


@pytest.mark.slow
def test_killed_elements_cost_units_alone(cluster: Any, submit: Callable[..., Launch], tmp_path: Path) -> None:
    rng, words = random.Random(SEED), np.random.default_rng(SEED)
    (tmp_path / "in").mkdir()
    for number in range(60):
        texts = [" ".join(map(str, words.integers(0, 10**9, int(n)))) for n in words.integers(1, 200, 40)]
        texts += [f"in every file {i}" for i in range(9)]
        lines = "".join(f'{{"text": "{text}"}}\n' for text in texts)
        (tmp_path / f"in/{number:02d}.jsonl").write_text(lines, encoding="utf-8")
    Tokenizer.train(texts, vocab_size=300).save(tmp_path / "tok")
    job = {"tokenizer": tmp_path / "tok", "unit_bytes": UNIT_BYTES, "selection": Selection(drop_duplicates=True)}
    prepare([tmp_path / "in"], out=tmp_path / "whole", engine="hf", **job)
    expected = contents(tmp_path / "whole")
    killed = number = 0
    while killed < KILLS:
        out = tmp_path / f"store-{number}"
        given = ["prepare", tmp_path / "in", "--tokenizer", tmp_path / "tok", "--out", out, "--engine", "hf"]
        given += ["--unit-bytes", UNIT_BYTES, "--drop-duplicates"]
        quoted = ", ".join(f'"{word}"' for word in given)
        made = submit(RUN_FILE.format(round=number, elements=ELEMENTS, python=sys.executable, words=quoted))
        id_ = made.job_ids["prepare"]
        deadline = time.monotonic() + 240
        while cluster.run("squeue", "-h", "-r", "-j", id_, "-o", "%i", code=None).strip():
            assert time.monotonic() < deadline, cluster.tail()
            for element in cluster.run("squeue", "-h", "-r", "-j", id_, "-t", "PD", "-o", "%i", code=None).split():
                cluster.job_in_a_hurry(element)
            time.sleep(rng.uniform(0.05, 0.4))
            victims = processes(cluster, out)
            if victims and killed < KILLS:
                rng.choice(victims).kill()
                killed += 1
        states = {one.stage: one.state for one in SlurmTarget().status(made)}
        assert states == {f"prepare.{index}": "completed" for index in range(ELEMENTS)}
        assert contents(out) == expected
        number += 1
    sys.stdout.write(f"{killed} kills in {number} jobs\n")
