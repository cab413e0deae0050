"""Which processes a node runs, with which command line and which environment; pure.

The variables are those of torchrun, so that whatever runs under torchrun runs here. Rank order is the order of the
nodes as they were given: rank = node * processes per node + process.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

from .policy import Table

TORCHRUN_SIGNALS = "SIGTERM,SIGINT,SIGUSR1,SIGUSR2,SIGHUP,SIGQUIT"

RECIPE, INDEX, ARRAY = "{recipe}", "{index}", "{array}"
"""Words of a command line that stand for the path of the resolved recipe, an element's index, the array's width."""


class Start:
    """The processes of one agent and where they meet."""

    def __init__(self, *, node: int, nodes: int, procs: int, master_addr: str, master_port: int) -> None:
        self.node, self.nodes, self.procs = node, nodes, procs
        self.master_addr, self.master_port = master_addr, master_port
        first = node * procs
        self.ranks: tuple[int, ...] = tuple(range(first, first + procs))


def torchrun(spec: Table) -> bool:
    """Whether one torchrun makes the processes of a node."""
    return spec.get("spawner") == "torchrun"


def argv_of(spec: Table, start: Start, folder: Path, index: int | None) -> list[str]:
    """The command line of one process, or of the torchrun that makes them all; the recipe stands beside the spec."""
    words = {RECIPE: str(folder / "recipe.toml")}
    if index is not None:
        words.update({INDEX: str(index), ARRAY: str(spec.get("array") or 0)})
    given: list[str] = spec["argv"]
    argv = [words.get(word, word) for word in given]
    if torchrun(spec):
        argv = torchrun_argv(argv, start)
    setup = spec.get("setup") or []
    return ["bash", "-c", "\n".join([*setup, 'exec "$@"']), "lt-launch", *argv] if setup else argv


def torchrun_argv(argv: list[str], start: Start) -> list[str]:
    """One torchrun with static rendezvous, whose ranks follow the node rank that it is given."""
    python, *rest = argv
    return [
        python,
        "-m",
        "torch.distributed.run",
        f"--nnodes={start.nodes}",
        f"--node-rank={start.node}",
        f"--nproc-per-node={start.procs}",
        "--rdzv-backend=static",
        f"--master-addr={start.master_addr}",
        f"--master-port={start.master_port}",
        "--max-restarts=0",
        *rest,
    ]


def environment_of(
    spec: Table,
    start: Start,
    rank: int,
    index: int | None,
    attempt: int,
    folder: Path,
    environ: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The environment of one process: this agent's, the job's, and who the process is."""
    env = dict(os.environ if environ is None else environ)
    env.update(spec.get("env") or {})
    if spec.get("bin"):  # commands of the interpreter's own environment (lt, torchrun) before others
        env["PATH"] = f"{spec['bin']}{os.pathsep}{env.get('PATH', os.defpath)}"
    local = rank - start.node * start.procs
    if torchrun(spec):
        grace = str(math.ceil(float(spec["grace_s"])))
        env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = env["PET_SHUTDOWN_TIMEOUT"] = grace
        env["PET_SIGNALS_TO_HANDLE"] = env["TORCHELASTIC_SIGNALS_TO_HANDLE"] = TORCHRUN_SIGNALS
        env["LT_EXIT_CODES"] = str(folder / f"codes-{start.node:05}")
    else:
        env["RANK"], env["WORLD_SIZE"] = str(rank), str(start.nodes * start.procs)
        env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"] = str(local), str(start.procs)
        env["GROUP_RANK"] = env["NODE_RANK"] = str(start.node)
        env["MASTER_ADDR"], env["MASTER_PORT"] = start.master_addr, str(start.master_port)
    if start.procs > 1:
        env.setdefault("OMP_NUM_THREADS", "1")
    env.setdefault("PYTHONUNBUFFERED", "1")
    env["LT_ATTEMPT"] = str(attempt)
    if index is not None:
        env["LT_ARRAY_INDEX"], env["LT_ARRAY_SIZE"] = str(index), str(spec.get("array") or 0)
    return env
