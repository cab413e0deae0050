"""The null device as a fixture: built once, one process whose ranks have it."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from null_device.build import build, missing
from null_device.ranks import Job, RankResult
from null_device.server import NullDeviceServer
from null_device.trace import Part, read_log

Run = tuple[list[RankResult], list[dict[str, Part]]]


@pytest.fixture(scope="session")
def null_device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NullDeviceServer]:
    """A process with the null device; without what it needs the tests are skipped."""
    if (reason := missing()) is not None:
        pytest.skip(f"nothing of the CUDA path is checked here: {reason}")
    server = NullDeviceServer(build(tmp_path_factory.mktemp("null_device")))
    yield server
    server.close()


@pytest.fixture(scope="session")
def run_job(null_device, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Job], Run]:
    """Runs a job: results and logs by rank. Each job runs once; its `folder` is set here."""
    done: dict[Job, Run] = {}

    def run(job: Job) -> Run:
        key = replace(job, folder="")
        if key not in done:
            folder = tmp_path_factory.mktemp("job")
            results = null_device.run(replace(job, folder=str(folder)))
            done[key] = results, [read_log(folder / f"{rank}.log") for rank in range(job.ranks)]
        return done[key]

    return run
