"""Container side of a training job: `lt launch sagemaker-entrypoint`, process 1 of the container.

    1  read the contract, resolve the recipe, compare the tokenizer; a mismatch ends the job with its reason
    2  start the agent (`lt_launch.agent`), one process per device, static ranks, rank 0 on the first host
    3  forward SIGTERM immediately; processes save within the grace period, the service kills everything after 120 s
    4  after a lost process or exit code 75, restart the attempt in place, as long as checkpoints make progress
    5  on success, export the trained model to /opt/ml/model as a Hugging Face folder (rank 0's host) and exit with 0;
       else write the rank that failed first, its host, exit code and last lines to /opt/ml/output/failure

The network is used only between the hosts. A stopped job exits with 75, never with 0: only a complete model is a
success.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lt_launch.agent import verdict
from lt_launch.agent.main import finish
from lt_launch.agent.policy import Place, write_table
from lt_launch.sagemaker.container_recipe import procs_per_node, resolve_recipe
from lt_launch.sagemaker.contract import GRACE_PERIOD_S, Contract, read_contract
from lt_launch.sagemaker.errors import SageMakerError
from lt_launch.sagemaker.failure import failure_text, write_failure
from lt_launch.sagemaker.toolkit import toolkit_environment

__all__ = ["MASTER_PORT", "run_entrypoint"]

MASTER_PORT = 7777
"""Port used by SageMaker's own containers."""
MAX_RESTARTS, MAX_WITHOUT_PROGRESS = 10, 2
DNS_TIMEOUT_S = 120.0
EXIT_REQUEUE, EXIT_INTERNAL = 75, 70
OFFLINE_ENV = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
"""Variables that disable network access of libraries, which would wait for a timeout."""


@dataclass
class ChildRunner:
    """Sequential runner of child processes; as process 1 it also reaps orphaned processes."""

    stop_signal: int = 0
    _running: subprocess.Popen[bytes] | None = None
    _previous_handlers: dict[int, Any] = field(default_factory=dict)

    def __enter__(self) -> ChildRunner:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous_handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: object) -> None:
        first = not self.stop_signal
        self.stop_signal = number
        if first and self._running is not None:
            with suppress(ProcessLookupError):
                os.kill(self._running.pid, signal.SIGTERM)

    def run(self, command: Sequence[str], env: Mapping[str, str], *, forward_stop: bool = True) -> int:
        """Run a command to its end; return its exit code, 128 + n for signal n.

        `forward_stop`: whether the command receives the stop signal.
        """
        process = subprocess.Popen(command, env=dict(env), preexec_fn=_block_sigterm if forward_stop else None)
        if forward_stop:
            self._running = process
            if self.stop_signal:  # received before the process was started
                os.kill(process.pid, signal.SIGTERM)
        try:
            while True:
                pid, status = os.wait()
                if pid == process.pid:
                    break
        finally:
            self._running = None
        code = os.waitstatus_to_exitcode(status)
        process.returncode = code
        return code if code >= 0 else 128 - code


def _block_sigterm() -> None:
    """Block SIGTERM in the child until the agent can handle it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))


def run_entrypoint(root: Path, environ: Mapping[str, str], log: Callable[[str], None]) -> int:
    """Train according to the contract below `root`.

    Args:
        root: /opt/ml, or its replacement.
        environ: environment of the container.
        log: receives lines for the log.

    Returns:
        0 success, 75 stopped and saved, else the exit code of the first failure.
    """
    with ChildRunner() as children:
        try:
            contract = read_contract(root, environ)
            return _train(contract, environ, children, log)
        except ValueError as exc:
            code = getattr(exc, "exit_code", None)
            if not isinstance(code, int):
                write_failure(root / "output" / "failure", failure_text(f"{type(exc).__name__}: {exc}", []))
                raise
            log(f"error: {exc}")
            write_failure(root / "output" / "failure", failure_text(str(exc), []))
            return code
        except BaseException as exc:
            write_failure(root / "output" / "failure", failure_text(f"{type(exc).__name__}: {exc}", []))
            raise


def _train(contract: Contract, environ: Mapping[str, str], children: ChildRunner, log: Callable[[str], None]) -> int:
    from lt_trainer.config import to_toml

    cluster, procs = contract.cluster, procs_per_node(contract, environ)
    resolved = resolve_recipe(contract, environ)
    recipe = resolved.recipe
    output = contract.output_data_dir / "lt"
    output.mkdir(parents=True, exist_ok=True)
    run_toml = output / "run.toml"
    run_toml.write_text(to_toml(recipe, resolved.origins), encoding="utf-8")
    is_first_host = cluster.node_rank == 0
    log(
        f"host {cluster.current_host}, {cluster.node_rank + 1} of {len(cluster.hosts)}, {procs} process(es) on it; "
        f"store {recipe.data.store}, run directory {recipe.run.dir}"
    )
    if is_first_host and not contract.has_checkpoint_config and "run" not in contract.channels:
        log("warning: the job has no CheckpointConfig; an unfinished run is lost with the instance")
    spec = {
        "argv": [sys.executable, "-m", "lt_trainer", "run", str(run_toml)],
        "spawner": "direct",
        "nodes": len(cluster.hosts),
        "procs_per_node": procs,
        "env": {},
        "cwd": "",
        "grace_s": GRACE_PERIOD_S,
        "run_dir": recipe.run.dir,
        "completion": "run_dir" if is_first_host else "exit",  # other hosts may see the run directory too early
        "restart": {"max_restarts": MAX_RESTARTS, "max_without_progress": MAX_WITHOUT_PROGRESS},
    }
    code = _run_attempts(
        contract, spec, output, {**environ, **OFFLINE_ENV, **_container_env(contract, environ)}, children, log
    )
    if code == 0 and is_first_host:
        code = _export_model(contract, Path(recipe.run.dir), environ, children, log)
    return code


def _container_env(contract: Contract, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the SM_* variables and the network interface for NCCL and gloo."""
    env = toolkit_environment(contract, environ)
    interface = contract.cluster.network_interface
    return env | ({"NCCL_SOCKET_IFNAME": interface, "GLOO_SOCKET_IFNAME": interface} if interface else {})


def _run_attempts(
    contract: Contract,
    spec: dict[str, Any],
    output: Path,
    environ: Mapping[str, str],
    children: ChildRunner,
    log: Callable[[str], None],
) -> int:
    """Run the agent, with restarts; report a failure and return the exit code of the last attempt."""
    path = output / "stages" / "train" / "spec.json"
    write_table(path, spec)
    agent, place = [sys.executable, "-m", "lt_launch.agent", "node", str(path)], Place(path)
    cluster = contract.cluster
    _wait_for_dns(cluster.master_addr, children)
    rendezvous = [
        "--master-addr",
        cluster.master_addr,
        "--master-port",
        environ.get("SM_MASTER_PORT", str(MASTER_PORT)),
    ]
    while True:
        number = place.new_attempt()
        command = [*agent, "--attempt", str(number), "--node-rank", str(cluster.node_rank), *rendezvous]
        code = children.run(command, environ)
        # In-process to save start-up time: after a long save the service's SIGKILL may follow within seconds.
        result = finish(spec, place, number, verdict.conclude(spec, place, number, code))
        log(verdict.report(result))
        if result["kind"] == "done":
            return 0
        if children.stop_signal:
            log(f"stopped by {signal.Signals(children.stop_signal).name}: {result['reason']}")
            if result["code"] == EXIT_REQUEUE:
                return EXIT_REQUEUE
        else:
            should_restart, reason = verdict.again(spec, place, result)
            log(f"restarting: {reason}" if should_restart else reason)
            if should_restart:
                continue
        write_failure(contract.failure_file, _failure_message(contract, result))
        return int(result["code"]) or EXIT_INTERNAL


def _wait_for_dns(host: str, children: ChildRunner) -> None:
    """Wait until the name of rank 0's host resolves: the service registers names as hosts start.

    Raises:
        SageMakerError: it did not within DNS_TIMEOUT_S; ranks would wait for it forever.
    """
    deadline = time.monotonic() + DNS_TIMEOUT_S
    while not children.stop_signal:
        try:
            socket.getaddrinfo(host, None)
        except OSError as exc:
            if time.monotonic() > deadline:
                raise SageMakerError(
                    f"the name of the first host, {host}, has no address: {exc}", exit_code=75
                ) from exc
            time.sleep(1)
        else:
            return


def _failure_message(contract: Contract, result: Mapping[str, Any]) -> str:
    first = result.get("first") or {}
    cause = str(result["reason"])
    if first.get("rank") is not None:  # the service's host name, not the container's
        cause = cause.replace(f"on {first['host']} ", f"on {contract.cluster.current_host} ", 1)
    return failure_text(cause, list(first.get("tail") or []))


def _export_model(
    contract: Contract, run: Path, environ: Mapping[str, str], children: ChildRunner, log: Callable[[str], None]
) -> int:
    """Export the trained model as a Hugging Face folder into /opt/ml/model, which may be a mount."""
    contract.model_dir.mkdir(parents=True, exist_ok=True)
    temporary = contract.model_dir / ".lt-export"
    if temporary.exists():  # left by an interrupted export
        shutil.rmtree(temporary)
    command = [sys.executable, "-m", "lt_ckpt", "export", str(run), "--out", str(temporary)]
    code = children.run(command, environ, forward_stop=False)
    if code:
        write_failure(
            contract.failure_file, f"training completed, but the model could not be exported (exit code {code})"
        )
        return code
    for path in sorted(temporary.iterdir()):
        os.replace(path, contract.model_dir / path.name)
    temporary.rmdir()
    for name in ("metrics.jsonl", "events.jsonl", "recipe.toml", "environment.json"):
        if (run / name).exists():
            shutil.copy2(run / name, contract.output_data_dir / "lt" / name)
    names = json.dumps(sorted(path.name for path in contract.model_dir.iterdir()))
    log(f"the model is in {contract.model_dir}: {names}")
    return 0
