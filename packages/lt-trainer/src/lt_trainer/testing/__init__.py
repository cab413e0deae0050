"""Ranks for the tests of engines: real processes, forked in milliseconds from one that has torch loaded already.

    RankPool    calls one function in several ranks and gives back what each returned: for collectives and engines
    start_run   runs the `lt-train` command in several ranks: for kills, signals and resumes
    bucket      (a module) an S3 server at the end of a line that can be cut and held: for mirrors; needs moto[server]

Imported by tests alone; needs lt-trainer[torch]. Every rank is a new process, so nothing that one test does to torch,
to the environment or to the signals reaches the next.
"""

from lt_trainer.testing.forks import RankError
from lt_trainer.testing.pool import RankPool
from lt_trainer.testing.runs import Run, start_run

__all__ = ["RankError", "RankPool", "Run", "start_run"]
