"""Test ranks for engines: real processes, forked in milliseconds from a server with torch loaded.

    RankPool    calls a function in several ranks and returns their results: for collectives and engines
    start_run   runs the `lt-train` command in several ranks: for kills, signals and resumes

Only for tests; needs lt-trainer[torch]. Every rank is a new process, so a test's changes to torch, environment or
signals do not affect other tests.
"""

from lt_trainer.testing.forkserver import RankError
from lt_trainer.testing.pool import RankPool
from lt_trainer.testing.rank_processes import RankProcesses, start_run

__all__ = ["RankError", "RankPool", "RankProcesses", "start_run"]
