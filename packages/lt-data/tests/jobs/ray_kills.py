"""Prepares units on a local Ray cluster that loses workers: SOURCES TOKENIZER OUT KILLS SEED.

Workers are killed at random, and the job is made again and again, until there were so many kills. Run by test_units.py
in an environment that has ray; prints the number of kills.
"""

import random
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import ray

import lt_data
from lt_data.store.manifest import Selection

WORKERS = 4


def start_cluster() -> None:
    """Start a cluster; on a busy machine that takes longer than the 30 s that Ray allows."""
    for left in reversed(range(10)):
        try:
            ray.init(num_cpus=WORKERS, include_dashboard=False, log_to_driver=False)
            return
        except Exception as exc:
            if not left or "timed out during startup" not in str(exc):
                raise
            ray.shutdown()


def main(sources: str, tokenizer: str, out: Path, kills: int, seed: int) -> None:
    start_cluster()
    rng, killed, stop = random.Random(seed), 0, threading.Event()

    def kill() -> None:
        nonlocal killed
        while not stop.is_set() and killed < kills:
            time.sleep(rng.uniform(0.05, 0.3))
            tasks = [one for one in psutil.process_iter(["cmdline"]) if "ray::build_" in str(one.info["cmdline"])]
            if tasks:
                rng.choice(tasks).send_signal(signal.SIGKILL)
                killed += 1

    selection = Selection(drop_duplicates=out.name == "distinct")
    job = {"tokenizer": tokenizer, "out": out, "unit_bytes": 40_000, "selection": selection, "engine": "hf"}
    killer = threading.Thread(target=kill)
    killer.start()
    try:
        while killed < kills or not (out / "manifest.json").exists():
            if (out / "manifest.json").exists():
                shutil.rmtree(out)
            try:
                lt_data.prepare([sources], workers=WORKERS, ray="auto", **job)
            except lt_data.DataError as exc:  # a worker that was killed again and again, before it could end
                if "run the same command again" not in str(exc):
                    raise
    finally:
        stop.set()
        killer.join()
        ray.shutdown()
    sys.stdout.write(f"\n{killed}\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
