"""A process that is killed while it saves: the newest valid checkpoint is whole, and the next save goes on.

One saver after another saves, now and then over a checkpoint of the same step, prunes, and is killed with SIGKILL: at a
moment drawn at random, or when the file of some stage appears, or a little later. LT_KILLS kills make the slow test,
LT_SEED chooses which.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from lt_ckpt import begin_save, find_latest_valid

KILLS = int(os.environ.get("LT_KILLS", "200"))
SEED = int(os.environ.get("LT_SEED", "0"))
STAGES = (".tmp-", "weights-", "part-00000", "part-00001", "tokenizer", "manifest.json", "COMMIT", "step-", ".trash-")
"""What appears in the course of a save."""

SAVER = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from conftest import toy_save
from lt_ckpt import prune_checkpoints
root, step = Path({root!r}), {first}
print("ready", flush=True)
while True:
    toy_save(root, step, world=2)
    toy_save(root, step, world=2, seed=step + 1000, overwrite=True)  # the same step once more, another state
    prune_checkpoints(root, keep_last=2)
    step += 1
"""


BACKGROUND = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from conftest import toy_shards, toy_state
from lt_ckpt import CheckpointMetadata, begin_save, commit_save, prune_checkpoints
from lt_ckpt.async_save import AsyncRankSaver
root, step, saver = Path({root!r}), {first}, AsyncRankSaver()
print("ready", flush=True)
while True:
    state = toy_state(step)
    saver.wait()
    tmp = begin_save(root, step=step, world_size=1)
    def then(given_up, tmp=tmp, step=step):
        commit_save(tmp, world_size=1, metadata=CheckpointMetadata(step=step))
        prune_checkpoints(root, keep_last=2)
    saver.start(tmp, rank=0, shards=toy_shards(state, 0, 1), on_written=then)
    for _, array in state.values():
        array.fill(0)  # the next step
    step += 1
"""


def appeared(root: Path, stage: str) -> bool:
    """Whether a save under way has come to a stage."""
    try:
        names = os.listdir(root)
        inner = [name for folder in names if folder.startswith(".tmp-") for name in os.listdir(root / folder)]
    except FileNotFoundError:  # it goes on meanwhile
        return False
    return any(name.startswith(stage) for name in (*names, *inner))


def kill_one(root: Path, rng: random.Random, first: int, saver: str) -> str:
    """Starts a saver that goes on at a step and kills it; returns when."""
    code = saver.format(tests=str(Path(__file__).parent), root=str(root), first=first)
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    stage = rng.choice(["", *STAGES])
    if stage:
        deadline = time.monotonic() + 5
        while not appeared(root, stage) and time.monotonic() < deadline:
            pass
        time.sleep(rng.choice([0, rng.uniform(0, 0.005)]))
    else:
        time.sleep(rng.uniform(0.02, 0.3))
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    child.stdout.close()
    return stage or "any time"


def require_old_or_new(root: Path, toy, last: int) -> int:
    """The newest valid checkpoint is of one save, and not older than `last`; returns its step."""
    found, rejected = find_latest_valid(root)
    assert rejected == []
    if found is not None:
        norm = found.read("weights", "norm").tobytes()
        seeds = [
            seed for seed in (found.step, found.step + 1000) if toy.state(seed)["weights", "norm"][1].tobytes() == norm
        ]
        assert len(seeds) == 1
        toy.check(found, seed=seeds[0])  # every tensor is of that save
    step = found.step if found else 0
    assert step >= last, "a committed checkpoint was lost"
    return step


def kills(root: Path, toy, seed: int, n: int, saver: str = SAVER) -> Counter[str]:
    rng, last, when = random.Random(seed), 0, Counter()
    while sum(when.values()) < n or last == 0:  # on a machine that is busy a round may end before its first save
        when[kill_one(root, rng, last + 1, saver)] += 1
        assert sum(when.values()) < n + 100
        last = require_old_or_new(root, toy, last)
    begin_save(root, step=last + 1, world_size=1)
    left = [name for name in os.listdir(root) if name.startswith(".")]
    assert len([name for name in left if (root / name / "save.json").exists()]) == 1, "dead saves are swept"
    return when


@pytest.mark.parametrize("saver", [SAVER, BACKGROUND], ids=["foreground", "background"])
def test_kill_9_at_a_random_moment(tmp_path, toy, saver):
    kills(tmp_path, toy, 0, 3, saver)


@pytest.mark.slow
def test_many_kills(tmp_path, toy):
    when = kills(tmp_path, toy, 1000 + SEED, KILLS)
    shown = ", ".join(f"{stage} {count}" for stage, count in sorted(when.items()))
    sys.stdout.write(f"{sum(when.values())} kills ({shown}): always the old checkpoint or the new one\n")
