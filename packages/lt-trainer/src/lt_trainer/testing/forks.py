"""One server process with torch loaded, the ranks that it forks, and the port where they meet.

The server is that of `multiprocessing`'s "forkserver": it imports the heavy modules once (some seconds), starts no
thread and touches no device; a fork costs about 15 ms. Ranks meet at 127.0.0.1 and a port of their own. It lies below
the range from which systems give out ports, and a UDP socket of the same number claims it: no other user of this module
takes it meanwhile, the TCP store is not in the way, and the system lets go of it when the claimant dies.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import multiprocessing
import os
import random
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from types import ModuleType
from typing import Any

HEAVY = (
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.optim",
    "torch._dynamo",  # by far the longest to load of what an optimizer imports when it is made
    "numpy.random",
    "lt_data.streaming.rows",
    "lt_data.store.token_store",
    "lt_data.streaming.stream",
    "lt_ckpt.checkpoint",
    "lt_ckpt.discover",
    "lt_ckpt.save",
    "lt_model.init",
    "lt_model.llama",
    "lt_trainer.cli",
    "lt_trainer.hyperparameters",
    "lt_trainer.run",
    "lt_trainer.torch",
)
"""What the server imports before it forks, so that ranks need not."""

PORTS = range(20000, 29000)
GRACE_S = 10.0
"""How long a process may take for what should take it no time."""


class RankError(RuntimeError):
    """A rank died, did not finish, or failed with an error that cannot be sent."""


def forkserver_context(preload: Sequence[str]) -> ForkServerContext:
    """The context whose server has the heavy modules; started by the first call, which alone chooses `preload`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*HEAVY, *preload])
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch and numpy load: a server with threads cannot fork safely
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
    return context


class Claim:
    """A port for the TCP store of ranks, which no other claim takes until this one is closed.

    Raises:
        RankError: No port is free.
    """

    def __init__(self) -> None:
        for port in random.SystemRandom().sample(PORTS, len(PORTS)):
            held = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            try:
                held.bind(("127.0.0.1", port))
                with socket.socket() as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(("", port))
            except OSError:
                held.close()
                continue
            self.port, self._held = port, held
            return
        raise RankError(f"no port from {PORTS.start} to {PORTS.stop - 1} is free on this machine")

    def close(self) -> None:
        """Let go of the port."""
        self._held.close()


def environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """This process's environment with the variables that torchrun gives a rank on a single node."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def become_rank(environ: Mapping[str, str]) -> None:
    """Give a forked process the environment and the signal handlers of one that was started by a shell."""
    os.environ.clear()
    os.environ.update(environ)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    faulthandler.enable()  # SIGABRT shows the stacks of a rank that hangs


def load(path: str, module_name: str, name: str) -> Callable[..., Any]:
    """The function `name` of the file `path`.

    Test modules cannot be imported by name, so the file is loaded under the name that the test knows it by: then
    instances of its classes can be sent both ways.
    """
    if module_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None
        assert spec.loader is not None
        parts = module_name.split(".")
        for n in range(1, len(parts)):  # pickle imports the whole path, as far as it is not there
            parent = ".".join(parts[:n])
            sys.modules.setdefault(parent, ModuleType(parent))
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    return getattr(sys.modules[module_name], name)


def abort(processes: Sequence[ForkServerProcess]) -> None:
    """End processes that hang; their stacks go to their standard error."""
    for process in processes:
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, signal.SIGABRT)
    for process in processes:
        process.join(GRACE_S)


def end(processes: Sequence[ForkServerProcess]) -> None:
    """Kill processes and forget them."""
    started = [process for process in processes if process.pid is not None]
    for process in started:
        process.kill()
    for process in started:
        process.join()
        process.close()
