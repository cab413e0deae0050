"""Fork server with torch loaded, the ranks that it forks, and their rendezvous port.

The server is `multiprocessing`'s "forkserver": it imports the heavy modules once (some seconds), starts no thread and
uses no device; a fork takes about 15 ms. Ranks rendezvous at 127.0.0.1 and a port below the ephemeral range. A UDP
socket on the same number claims it: other claims cannot take it, the TCP store can still bind it, and the system
releases it when the claiming process dies.
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

PRELOADED_MODULES = (
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.optim",
    "torch._dynamo",  # imported by optimizers on creation; by far the slowest import
    "numpy.random",
    "lt_data.streaming.rows",
    "lt_data.store.token_store",
    "lt_data.streaming.stream",
    "lt_ckpt.checkpoint",
    "lt_ckpt.discovery",
    "lt_ckpt.save",
    "lt_model.init",
    "lt_model.decoder",
    "lt_trainer.cli.commands",
    "lt_trainer.config.hyperparameters",
    "lt_trainer.training.loop",
    "lt_trainer.torch",
)
"""Modules that the server imports before it forks."""

PORTS = range(20000, 29000)
JOIN_TIMEOUT_S = 10.0
"""Timeout for processes to exit."""


class RankError(RuntimeError):
    """Rank died, did not finish, or raised an error that cannot be pickled."""


def forkserver_context(preload: Sequence[str]) -> ForkServerContext:
    """Return the context with preloaded modules; only the first call starts the server and uses `preload`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED_MODULES, *preload])
    previous = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch and numpy load: a server with threads cannot fork safely
    try:
        forkserver.ensure_running()
    finally:
        if previous is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = previous
    return context


class PortClaim:
    """Exclusive claim of a port for the ranks' TCP store, until closed.

    Raises:
        RankError: No free port.
    """

    def __init__(self) -> None:
        for port in random.SystemRandom().sample(PORTS, len(PORTS)):
            claim = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            try:
                claim.bind(("127.0.0.1", port))
                with socket.socket() as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(("", port))
            except OSError:
                claim.close()
                continue
            self.port, self._socket = port, claim
            return
        raise RankError(f"no free port from {PORTS.start} to {PORTS.stop - 1}")

    def close(self) -> None:
        """Release the port."""
        self._socket.close()


def rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return this process's environment with torchrun's variables of a rank on one node."""
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
    """Set environment and default signal handlers in a forked process, as if started by a shell."""
    os.environ.clear()
    os.environ.update(environ)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    faulthandler.enable()  # SIGABRT prints the stacks of a hanging rank
    if "lt_trainer_gpu.peak_flops" in sys.modules:
        sys.modules["lt_trainer_gpu.peak_flops"].measure_matmul_flops = lambda *_: (1e12, "set")  # 0.2 s


def load_function(path: str, module_name: str, name: str) -> Callable[..., Any]:
    """Return the function `name` of the file `path`.

    Test modules cannot be imported by name, so the file is loaded under the test's module name: instances of its
    classes can then be pickled in both directions.
    """
    if module_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None
        assert spec.loader is not None
        parts = module_name.split(".")
        for n in range(1, len(parts)):  # pickle imports all missing parents
            parent = ".".join(parts[:n])
            sys.modules.setdefault(parent, ModuleType(parent))
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    return getattr(sys.modules[module_name], name)


def abort_processes(processes: Sequence[ForkServerProcess]) -> None:
    """Abort hanging processes, which print their stacks to standard error."""
    for process in processes:
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, signal.SIGABRT)
    for process in processes:
        process.join(JOIN_TIMEOUT_S)


def kill_processes(processes: Sequence[ForkServerProcess]) -> None:
    """Kill and close processes."""
    started = [process for process in processes if process.pid is not None]
    for process in started:
        process.kill()
    for process in started:
        process.join()
        process.close()
