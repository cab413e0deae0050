"""A process that is killed while it saves: the newest valid checkpoint is whole, and the next save goes on."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lt_ckpt import begin, latest_valid

SAVER = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from conftest import toy_save
from lt_ckpt import prune
root, step = Path({root!r}), {first}
print("ready", flush=True)
while True:
    toy_save(root, step, world=2)
    prune(root, last=2)
    step += 1
"""


@pytest.mark.parametrize("seed", range(3))
def test_kill_9_at_a_random_moment(tmp_path, toy, seed):
    rng = random.Random(seed)
    last = rounds = 0
    while rounds < 2 or last == 0:  # on a machine that is busy a round may be over before its first save
        rounds += 1
        assert rounds < 100
        code = SAVER.format(tests=str(Path(__file__).parent), root=str(tmp_path), first=last + 1)
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        time.sleep(rng.uniform(0.05, 0.4))
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        child.stdout.close()
        found, rejected = latest_valid(tmp_path)
        assert rejected == []
        if found is not None:
            toy.check(found)
        step = found.step if found else 0
        assert step >= last, "a committed checkpoint was lost"
        last = step
    assert last > 0
    begin(tmp_path, step=last + 1, world=1)
    left = [name for name in os.listdir(tmp_path) if name.startswith(".")]
    assert len([name for name in left if (tmp_path / name / "save.json").exists()]) == 1, "dead saves are swept"


def test_the_save_of_a_living_process_is_left_alone(tmp_path, toy):
    code = SAVER.split("print")[0].format(tests=str(Path(__file__).parent), root=str(tmp_path), first=1)
    code += "from lt_ckpt import begin\nprint(begin(root, step=1, world=1), flush=True)\nsys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    theirs = Path(child.stdout.readline().decode().strip())
    toy.save(tmp_path, 5)
    assert theirs.exists()
    child.kill()  # not waited for: a zombie does not save any more either
    deadline = time.monotonic() + 10
    while theirs.exists() and time.monotonic() < deadline:
        toy.save(tmp_path, 6, replace=True)
    assert not theirs.exists()
    child.stdin.close()
    child.stdout.close()
    child.wait()
