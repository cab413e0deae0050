"""A program that behaves as `python -m lt_trainer run` does towards the launcher, without torch and in milliseconds.

    fake_trainer.py RUN_DIR STEPS SECONDS_PER_STEP

Rank 0 keeps the run directory: events.jsonl (start, stop, completed) and a committed checkpoint for each step. It goes
on from the newest one. Every rank leaves with 75 after SIGTERM or SIGINT. FAULT="rank:step:what" plants a fault in the
first attempt (FAULT_ALWAYS: in each): an exit code, -9 for a kill, "hang".
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

run, steps, pause = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
rank, attempt = int(os.environ["RANK"]), int(os.environ["LT_ATTEMPT"])
planted = os.environ.get("FAULT_ALWAYS") or (os.environ.get("FAULT", "") if attempt == 0 else "")
who, when, what = (planted or "-1:-1:0").split(":")
stopped = []
for one in (signal.SIGTERM, signal.SIGINT):
    signal.signal(one, lambda number, frame: stopped.append(number))


def say(text):
    os.write(1, f"{text}\n".encode())


def event(kind):
    if rank == 0:
        with open(run / "events.jsonl", "a") as file:
            file.write(json.dumps({"event": kind}) + "\n")


checkpoints, begun = run / "checkpoints", run / f"begun-{attempt}"
checkpoints.mkdir(parents=True, exist_ok=True)
if rank == 0:
    done = [int(path.parent.name[5:]) for path in checkpoints.glob("step-*/COMMIT")]
    (run / f".begun-{attempt}").write_text(str(max(done, default=0)))
    (run / f".begun-{attempt}").rename(begun)
while not begun.exists():  # all ranks go on from the same step
    time.sleep(0.005)
step = int(begun.read_text())
event("start")
say(f"rank {rank} of {os.environ['WORLD_SIZE']} goes on from step {step}")
while step < steps:
    step += 1
    if (int(who), int(when)) == (rank, step):
        say(f"rank {rank}: planted {what}")
        if what == "hang":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        elif int(what) >= 0:
            os._exit(int(what))
        else:
            os.kill(os.getpid(), -int(what))
        time.sleep(1000)
    if stopped:
        event("stop")
        say(f"rank {rank} stopped")
        sys.exit(75)
    if rank == 0:
        (checkpoints / f"step-{step:08}").mkdir(exist_ok=True)
        (checkpoints / f"step-{step:08}" / "COMMIT").touch()
    time.sleep(pause)
event("completed")
