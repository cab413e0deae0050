"""Plugin of pytest for one mutant: runs the selected tests in their order and writes down what happens.

The file that MUTANTS_SELECTION names has the tests (functions, files) one a line; into the one of MUTANTS_EVENTS go
lines of JSON: a test starts, passes, fails; a file of tests cannot be imported.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest


def write_event(**event: object) -> None:
    """Append a line at once, since the process may be killed."""
    with Path(os.environ["MUTANTS_EVENTS"]).open("a") as file:
        file.write(json.dumps(event | {"time": time.time()}) + "\n")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the selected tests."""
    names = Path(os.environ["MUTANTS_SELECTION"]).read_text().splitlines()
    order = {name: number for number, name in enumerate(names)}

    def place(item: pytest.Item) -> int | None:
        function, file = item.nodeid.partition("[")[0], item.nodeid.partition("::")[0]
        return next((order[name] for name in (item.nodeid, function, file) if name in order), None)

    places = {item.nodeid: place(item) for item in items}
    config.hook.pytest_deselected(items=[item for item in items if places[item.nodeid] is None])
    items[:] = sorted((item for item in items if places[item.nodeid] is not None), key=lambda i: places[i.nodeid] or 0)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Write down what cannot be imported."""
    if report.failed:
        write_event(event="failed", test=report.nodeid, message="cannot be collected")


def pytest_runtest_logstart(nodeid: str) -> None:
    """Write down what starts."""
    write_event(event="starts", test=nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write down what fails, and each call that passes."""
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        write_event(event="failed", test=report.nodeid, message=str(crash.message if crash else report.longrepr)[:300])
    elif report.when == "call" and report.passed:
        write_event(event="passed", test=report.nodeid)
