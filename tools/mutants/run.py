"""Plant each mutant of both sets and tell which test notices it.

    uv run python tools/mutants/run.py                       # both sets, then the score into score.md
    uv run python tools/mutants/run.py --set chosen --jobs 2
    uv run python tools/mutants/run.py --only ckpt-07        # some mutants
    uv run python tools/mutants/run.py --survivors           # again those that no test noticed

A mutant is planted in a clone of HEAD (`sandbox.py`), never in the checkout. It meets the default tests that run its
lines (`selection.py`; the map is made by `cover.py`), or where the map has none those that speak of it (`naming.py`),
at most 60 s of them, until the first fails. It counts as caught only by a test with a name that fails with the mutant
and passes without it, which is tried for each such test; if it fails there too, the mutant meets the others. One of
another package has to fail twice. A test that is still running after ten times its duration and 20 s counts as failed:
it hangs. Its duration is then measured without the mutant, and it has to hang again, alone.

Results are kept in `.mutants/results.json`, each with its commit.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from cover import MAP
from mutant import SETS, Mutant, read_set
from naming import tests_that_name
from run_tests import HANG_S, LIMIT_S, Failure, run_tests
from sandbox import CACHE, Sandbox, sandbox
from score import write_score
from selection import CoveringTest, LineMap, find_tests, select

FIRST_BY_NAME = 8
"""Tests by name that run before the rest: mostly one of them fails."""
TRACED = 2.0
"""A test takes about so many times longer in the map, which is made under a tracer and often beside other work: as many
more are selected, and those that the limit leaves no time for are not run."""
ROUNDS = 3
"""A mutant meets the other tests when one has failed that fails without it as well."""
ENOUGH_S = 600.0
"""Time for a test to pass without a mutant."""
RESULTS = CACHE / "results.json"


@dataclass(frozen=True, kw_only=True)
class Result:
    """What became of a mutant.

    Attributes:
        digest: the mutant's.
        commit: the code that it was planted in.
        caught_by: the test that failed; "" for a survivor.
        message: how it failed, or why nothing did.
        tests: number of tests that ran its lines, and of those that were selected; 0 and number of files, if by name.
        seconds: time of the run.
    """

    digest: str
    commit: str
    caught_by: str
    message: str
    tests: tuple[int, int]
    seconds: float


@contextmanager
def planted(box: Sandbox, mutant: Mutant, stamp: int) -> Iterator[tuple[str, range]]:
    """Change the file of a mutant in a sandbox; yields its text before and the lines that change."""
    path = box.root / mutant.file
    text, before = path.read_text(encoding="utf-8"), path.stat()
    changed, lines = mutant.apply(text)
    try:
        path.write_text(changed, encoding="utf-8")
        # Compiled files are known by time in seconds and size: two mutants of one second may have both in common.
        os.utime(path, (before.st_atime, before.st_mtime + 10 + stamp))
        yield text, lines
    finally:
        path.write_text(text, encoding="utf-8")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


class Runner:
    """Runs mutants, each in one of a few sandboxes."""

    def __init__(self, boxes: Sequence[Sandbox], limit_s: float, given: Sequence[str]) -> None:
        self._limit_s = limit_s
        self._given = [CoveringTest(name=name, seconds=0.0, share=1.0) for name in given]
        self._free: SimpleQueue[Sandbox] = SimpleQueue()
        for box in boxes:
            self._free.put(box)
        self._passing: dict[str, float] = {}
        """Time of each test that has passed without a mutant, run alone."""
        self._failing: set[str] = set()
        """Tests that fail without a mutant; no other mutant meets them."""
        self._lock = threading.Lock()
        self._stamp = 0

    def try_mutant(self, mutant: Mutant) -> Result:
        """Plant a mutant and run its tests."""
        box = self._free.get()
        try:
            with self._lock:
                self._stamp += 1
                stamp = self._stamp
            start = time.monotonic()
            failure, numbers = self._meet(box, mutant, stamp)
            message = "" if sum(numbers) else "no test runs its lines"
            rounds = 1
            while failure and (other := self._failure_without_it(box, failure.test)):
                message = f"{failure.test} fails without it as well: {other.message}"
                failure = self._meet(box, mutant, stamp)[0] if rounds < ROUNDS else None
                rounds += 1
            if failure and failure.hangs:
                message = f"{failure.test} takes long, but passes"
                with planted(box, mutant, stamp):
                    failure = self._hangs(box, failure.test)
            return Result(
                digest=mutant.digest,
                commit=box.commit,
                caught_by=failure.test if failure else "",
                message=failure.message if failure else message,
                tests=numbers,
                seconds=round(time.monotonic() - start, 1),
            )
        finally:
            self._free.put(box)

    def _meet(self, box: Sandbox, mutant: Mutant, stamp: int) -> tuple[Failure | None, tuple[int, int]]:
        """Run the tests of a mutant until one fails; returns the failure, and the numbers of tests for the result."""
        with planted(box, mutant, stamp) as (text, lines):
            found = self._given
            if not found and MAP.exists():
                found = find_tests(read_map(threading.get_ident(), MAP.stat().st_mtime), mutant.file, text, lines)
            found = [test for test in found if test.name not in self._failing]
            tests = self._given or select(found, mutant.package, TRACED * self._limit_s)
            failure = run_tests(box, tests, self._limit_s)
            if not failure and not any(is_own(test, mutant) for test in found):
                failing = {name.partition("[")[0] for name in self._failing}
                tests = [test for test in by_name(box, mutant, text) if test.name not in failing]
                failure = run_tests(box, tests[:FIRST_BY_NAME], self._limit_s / 2)
                failure = failure or run_tests(box, tests[FIRST_BY_NAME:], self._limit_s / 2)
            if failure and not is_own(failure, mutant):
                failure = self._again(box, failure)
        return failure, (len(found), len(tests))

    def _again(self, box: Sandbox, failure: Failure) -> Failure | None:
        """Return the failure if the test fails again, alone: one far from the change may only be in trouble itself."""
        return run_tests(box, [CoveringTest(name=failure.test, seconds=0.0, share=1.0)], self._limit_s)

    def _failure_without_it(self, box: Sandbox, name: str) -> Failure | None:
        """Return how a test fails on the code as it is, which it should not."""
        if name in self._passing:
            return None
        start = time.monotonic()
        failure = run_tests(box, [CoveringTest(name=name, seconds=ENOUGH_S, share=1.0)], ENOUGH_S)
        seconds = time.monotonic() - start
        if seconds >= ENOUGH_S:
            failure = failure or Failure(test=name, message=f"no end within {seconds:.0f} s")
        if failure:
            self._failing.add(name)
        else:
            self._passing[name] = seconds
        return failure

    def _hangs(self, box: Sandbox, name: str) -> Failure | None:
        """Return how a test fails alone that may only have been slow, by the time that it takes without the mutant."""
        test = CoveringTest(name=name, seconds=self._passing[name], share=1.0)
        return run_tests(box, [test], HANG_S + 10 * test.seconds)


@cache
def read_map(thread: int, time_of_change: float) -> LineMap:
    """Return the map for a thread, as it is since a time."""
    return LineMap(MAP)


def is_own(test: CoveringTest | Failure, mutant: Mutant) -> bool:
    """Tell whether a test is one of the package that a mutant changes."""
    name = test.test if isinstance(test, Failure) else test.name
    return name.startswith(f"packages/{mutant.package}/")


def by_name(box: Sandbox, mutant: Mutant, text: str) -> list[CoveringTest]:
    """Return the tests that speak of the changed code."""
    names = tests_that_name(box.root, mutant.file, text, mutant.scope)
    return [CoveringTest(name=name, seconds=0.0, share=1.0) for name in names]


def read_results() -> dict[str, dict[str, Any]]:
    """Return the results so far, by id of the mutant."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def keep(name: str, result: Result, lock: threading.Lock) -> None:
    """Write a result down."""
    with lock:
        RESULTS.write_text(json.dumps(read_results() | {name: asdict(result)}, indent=1))


def wanted(
    mutants: Sequence[Mutant], options: argparse.Namespace, results: Mapping[str, Mapping[str, Any]]
) -> list[Mutant]:
    """Return the mutants that the options ask for."""

    def is_wanted(mutant: Mutant) -> bool:
        result = results.get(mutant.id)
        is_known = result is not None and result["digest"] == mutant.digest
        return (
            (not options.only or mutant.id in options.only)
            and (not options.package or mutant.package in options.package)
            and (not options.survivors or (result is not None and not result["caught_by"]))
            and not (options.missing and is_known)
        )

    return [mutant for mutant in mutants if is_wanted(mutant)]


def main() -> int:
    """Run what is asked for; fails if a mutant of these survived."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=SETS, help="only this one; both without it")
    parser.add_argument("--only", nargs="+", metavar="ID", help="these mutants")
    parser.add_argument("--package", nargs="+", help="the mutants of these packages")
    parser.add_argument("--survivors", action="store_true", help="those that survived the last time")
    parser.add_argument("--missing", action="store_true", help="those that have no result yet, or have changed")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time (1)")
    parser.add_argument("--tests", nargs="+", default=[], help="run these tests, or files of tests, instead")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the sandboxes there for the next call")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of tests for a mutant (60)")
    options = parser.parse_args()
    every = [mutant for name in SETS if options.set in (None, name) for mutant in read_set(name)]
    mutants = wanted(every, options, read_results())
    lock = threading.Lock()
    with ExitStack() as stack:
        kept = [options.keep and options.keep / str(number) for number in range(min(options.jobs, len(mutants)))]
        boxes = [stack.enter_context(sandbox(folder)) for folder in kept]
        runner = Runner(boxes, options.limit, options.tests)

        def is_caught(mutant: Mutant) -> bool:
            result = runner.try_mutant(mutant)
            keep(mutant.id, result, lock)
            word = f"caught by {result.caught_by}" if result.caught_by else f"SURVIVED {result.message}"
            print(
                f"{mutant.id}: {word} ({result.tests[1]} of {result.tests[0]} tests, {result.seconds:.0f} s)",
                flush=True,
            )
            return bool(result.caught_by)

        with ThreadPoolExecutor(options.jobs) as pool:
            caught = list(pool.map(is_caught, mutants))
    print(f"{sum(caught)} of {len(caught)} caught", flush=True)
    write_score(read_results())
    return 0 if all(caught) else 1


if __name__ == "__main__":
    sys.exit(main())
