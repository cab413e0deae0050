"""Which test runs which lines: loaded by every Python process of the sandbox while `cover.py` fills the map.

A `.pth` file of the sandbox's environment imports this module at the start of each process, before any other code, so
that commands, ranks and agents that tests start are traced as pytest itself is. Each process writes a database of
coverage.py into the folder `raw/`, under the name of the test that ran when it started: tests run one after another,
and pytest writes into the file `context` which one it is. Forked processes begin a database of their own. What dies of
SIGKILL leaves nothing.

Lines that a fixture of a module or session runs count under the fixture's own name, and so does its time: `cover.py`
gives them to every test that uses it, and not only to the first, in which it happens to be set up.

PYTEST_DONT_REWRITE: pytest loads as a plugin what is already imported.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import atexit
import itertools
import json
import os
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, NoReturn

import coverage
import pytest

FOLDER = Path(__file__).with_name("mutants-trace")
ROOT = (FOLDER / "root").read_text()
CONTEXT = FOLDER / "context"
NUMBERS = itertools.count()


def begin() -> coverage.Coverage:
    """Trace this process, from here on, for the test that runs now."""
    traced = coverage.Coverage(
        data_file=str(FOLDER / "raw" / f"{os.getpid()}-{time.monotonic_ns()}-{next(NUMBERS)}"),
        config_file=False,
        include=[f"{ROOT}/packages/*/src/*"],
        messages=False,
    )
    traced.set_option("run:disable_warnings", ["no-data-collected", "module-not-measured", "already-imported"])
    traced.start()
    traced.switch_context(CONTEXT.read_text())
    return traced


class Process:
    """Tracing of this process; replaced in what it forks."""

    traced = begin()

    @classmethod
    def finish(cls) -> None:
        """Write what was traced."""
        cls.traced.stop()
        cls.traced.save()

    @classmethod
    def renew(cls) -> None:
        """Leave what the parent has traced to the parent."""
        cls.traced.stop()
        cls.traced = begin()


def exit_after(finish: Callable[[], None], leave: Callable[[int], NoReturn]) -> Callable[[int], NoReturn]:
    """Return `os._exit` of a traced process, with which forked ranks end."""

    def write_and_exit(status: int) -> NoReturn:
        finish()
        leave(status)

    return write_and_exit


atexit.register(Process.finish)
os.register_at_fork(after_in_child=Process.renew)
os._exit = exit_after(Process.finish, os._exit)


class Contexts:
    """Plugin of pytest: names of contexts, durations, and which fixtures each test uses."""

    def __init__(self) -> None:
        self.current = ""
        self.durations: dict[str, float] = {}
        self.fixtures: dict[str, list[str]] = {}
        self.setups: dict[str, float] = {}
        self.setups_of_test = 0.0
        self.failed: list[str] = []

    def switch(self, name: str) -> str:
        """Count lines from here on under `name`; returns the name before."""
        before, self.current = self.current, name
        CONTEXT.write_text(name)
        Process.traced.switch_context(name)
        return before

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Count a test's lines under its name."""
        before, start = self.switch(item.nodeid), time.monotonic()
        defined = getattr(item, "_fixtureinfo").name2fixturedefs  # noqa: B009 - no public name
        shared = [fixture_name(defs[-1]) for defs in defined.values() if defs[-1].scope != "function"]
        self.fixtures[item.nodeid] = shared
        self.setups_of_test = 0.0
        try:
            return (yield)
        finally:
            self.durations[item.nodeid] = time.monotonic() - start - self.setups_of_test
            self.switch(before)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
        """Count lines and time of a shared fixture under the fixture's name."""
        if fixturedef.scope == "function":
            return (yield)
        before, start = self.switch(fixture_name(fixturedef)), time.monotonic()
        try:
            return (yield)
        finally:
            seconds = time.monotonic() - start
            self.setups[self.switch(before)] = seconds
            self.setups_of_test += seconds

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note what fails while it is traced."""
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Write what the lines alone do not tell."""
        facts = {
            "durations": self.durations,
            "fixtures": self.fixtures,
            "setups": self.setups,
            "failed": self.failed,
        }
        (FOLDER / "tests.json").write_text(json.dumps(facts))


def fixture_name(fixturedef: pytest.FixtureDef[Any]) -> str:
    """Return the context of a fixture that tests share."""
    return f"fixture {fixturedef.baseid} {fixturedef.argname}"


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin: `-p trace_lines`."""
    config.pluginmanager.register(Contexts())
