"""The container's side of a training job: `lt launch sagemaker-entry`, process 1 of the container.

    1  read the contract, resolve the recipe, compare the tokenizer; what does not fit ends the job with its reason
    2  start the agent (`lt_launch.agent`), one process per device, static ranks, rank 0 on the first host
    3  hand SIGTERM on at once; processes have WINDOW_S to save, the service kills everything after 120 s
    4  a process that was lost or asked for it (exit code 75) is followed by another attempt in place, as long as
       checkpoints go forward
    5  done: the trained model goes to /opt/ml/model as a Hugging Face folder (rank 0's host), and the container ends
       with 0; else /opt/ml/output/failure says which rank failed first, where and how, and its last lines

The network is never used but between the hosts. A stopped job ends with 75, never with 0: only a model that is there in
full counts as done.
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
from lt_launch.agent.places import Place, write_table
from lt_launch.sagemaker.contract import Contract, read
from lt_launch.sagemaker.errors import SageMakerError
from lt_launch.sagemaker.failure import failure_text, write_failure
from lt_launch.sagemaker.resolving import WINDOW_S, processes, resolve
from lt_launch.sagemaker.toolkit import toolkit_environment

__all__ = ["MASTER_PORT", "entry"]

MASTER_PORT = 7777
"""The port that SageMaker's own containers use."""
MAX_RESTARTS, MAX_WITHOUT_PROGRESS = 10, 2
NAME_S = 120.0
EXIT_STOPPED, EXIT_OURS = 75, 70
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
"""Libraries that would try the network, and wait for it, are told that there is none."""


@dataclass
class Children:
    """Processes that this one starts, one at a time; as process 1 it also buries those that others leave behind."""

    stopped_by: int = 0
    _running: subprocess.Popen[bytes] | None = None
    _before: dict[int, Any] = field(default_factory=dict)

    def __enter__(self) -> Children:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: object) -> None:
        first = not self.stopped_by
        self.stopped_by = number
        if first and self._running is not None:
            with suppress(ProcessLookupError):
                os.kill(self._running.pid, signal.SIGTERM)

    def run(self, command: Sequence[str], env: Mapping[str, str], *, told: bool = True) -> int:
        """Run a command to its end; its exit code, 128 + n for signal n. `told`: whether it gets the stop signal."""
        process = subprocess.Popen(command, env=dict(env), preexec_fn=_hold_signals if told else None)
        if told:
            self._running = process
            if self.stopped_by:  # it came before there was anybody to tell
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


def _hold_signals() -> None:
    """What comes before the agent can take it waits for the agent, in place of ending it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))


def entry(root: Path, environ: Mapping[str, str], say: Callable[[str], None]) -> int:
    """Train as the contract below `root` says.

    Args:
        root: /opt/ml, or what stands for it.
        environ: the environment of the container.
        say: takes lines for the log.

    Returns:
        0 done, 75 stopped and saved, else the exit code of the first failure.
    """
    with Children() as children:
        try:
            contract = read(root, environ)
            return _train(contract, environ, children, say)
        except ValueError as exc:
            code = getattr(exc, "exit_code", None)
            if not isinstance(code, int):
                write_failure(root / "output" / "failure", failure_text(f"{type(exc).__name__}: {exc}", []))
                raise
            say(f"error: {exc}")
            write_failure(root / "output" / "failure", failure_text(str(exc), []))
            return code
        except BaseException as exc:
            write_failure(root / "output" / "failure", failure_text(f"{type(exc).__name__}: {exc}", []))
            raise


def _train(contract: Contract, environ: Mapping[str, str], children: Children, say: Callable[[str], None]) -> int:
    from lt_trainer.recipe import to_toml

    cluster, procs = contract.cluster, processes(contract, environ)
    resolved = resolve(contract, environ)
    recipe = resolved.recipe
    kept = contract.output_data / "lt"
    kept.mkdir(parents=True, exist_ok=True)
    run_toml = kept / "run.toml"
    run_toml.write_text(to_toml(recipe, resolved.origins), encoding="utf-8")
    first = cluster.node_rank == 0
    say(
        f"host {cluster.current_host}, {cluster.node_rank + 1} of {len(cluster.hosts)}, {procs} process(es) on it; "
        f"store {recipe.data.store}, run directory {recipe.run.out}"
    )
    if first and not contract.checkpoints_kept and "run" not in contract.channels:
        say("warning: the job has no CheckpointConfig: what is not trained to its end is lost with the instance")
    spec = {
        "argv": [sys.executable, "-m", "lt_trainer", "run", str(run_toml)],
        "spawner": "direct",
        "nodes": len(cluster.hosts),
        "procs_per_node": procs,
        "env": {},
        "cwd": "",
        "grace_s": WINDOW_S,
        "run_dir": recipe.run.out,
        "completion": "run_dir" if first else "exit",  # the others may see the run directory too early
        "restart": {"max_restarts": MAX_RESTARTS, "max_without_progress": MAX_WITHOUT_PROGRESS},
    }
    code = _attempts(contract, spec, kept, {**environ, **OFFLINE, **_variables(contract, procs)}, children, say)
    if code == 0 and first:
        code = _export(contract, Path(recipe.run.out), environ, children, say)
    return code


def _variables(contract: Contract, procs: int) -> dict[str, str]:
    """SM_* for code that expects them, and the interface for NCCL and gloo."""
    found = toolkit_environment(contract, devices=procs)
    interface = contract.cluster.interface
    return found | ({"NCCL_SOCKET_IFNAME": interface, "GLOO_SOCKET_IFNAME": interface} if interface else {})


def _attempts(
    contract: Contract,
    spec: dict[str, Any],
    kept: Path,
    environ: Mapping[str, str],
    children: Children,
    say: Callable[[str], None],
) -> int:
    """Start the agent, again where that may help; the exit code of the last attempt, with the failure told."""
    path = kept / "stages" / "train" / "spec.json"
    write_table(path, spec)
    agent, place = [sys.executable, "-m", "lt_launch.agent", "node", str(path)], Place(path)
    cluster = contract.cluster
    _wait_for_name(cluster.master_address, children)
    where = ["--master-addr", cluster.master_address, "--master-port", environ.get("SM_MASTER_PORT", str(MASTER_PORT))]
    while True:
        number = place.new_attempt()
        command = [*agent, "--attempt", str(number), "--node-rank", str(cluster.node_rank), *where]
        code = children.run(command, environ)
        # Here and not in a process of its own: after a long save every second before the service's SIGKILL counts.
        result = finish(spec, place, number, verdict.conclude(spec, place, number, code))
        say(verdict.report(result))
        if result["kind"] == "done":
            return 0
        if children.stopped_by:
            say(f"stopped by {signal.Signals(children.stopped_by).name}: {result['reason']}")
            if result["code"] == EXIT_STOPPED:
                return EXIT_STOPPED
        else:
            again, why = verdict.again(spec, place, result)
            say(f"trying again: {why}" if again else why)
            if again:
                continue
        write_failure(contract.failure, _failure(contract, result))
        return int(result["code"]) or EXIT_OURS


def _wait_for_name(host: str, children: Children) -> None:
    """Wait until the name of rank 0's host means an address: the service makes names as hosts come up.

    Raises:
        SageMakerError: it did not within NAME_S; ranks would wait for it without an end.
    """
    deadline = time.monotonic() + NAME_S
    while not children.stopped_by:
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


def _failure(contract: Contract, result: Mapping[str, Any]) -> str:
    first = result.get("first") or {}
    cause = str(result["reason"])
    if first.get("rank") is not None:  # the service's names of hosts, not the container's
        cause = cause.replace(f"on {first['host']} ", f"on {contract.cluster.current_host} ", 1)
    return failure_text(cause, list(first.get("tail") or []))


def _export(
    contract: Contract, run: Path, environ: Mapping[str, str], children: Children, say: Callable[[str], None]
) -> int:
    """The trained model as a Hugging Face folder in /opt/ml/model, which may be a mount and is not replaced."""
    contract.model.mkdir(parents=True, exist_ok=True)
    beside = contract.model / ".lt-export"
    if beside.exists():  # of an attempt that was cut off; the name is ours
        shutil.rmtree(beside)
    command = [sys.executable, "-m", "lt_ckpt", "export", str(run), "--out", str(beside)]
    code = children.run(command, environ, told=False)
    if code:
        write_failure(contract.failure, f"training is done, but its model could not be exported (exit code {code})")
        return code
    for path in sorted(beside.iterdir()):
        os.replace(path, contract.model / path.name)
    beside.rmdir()
    for name in ("metrics.jsonl", "events.jsonl", "recipe.toml", "environment.json"):
        if (run / name).exists():
            shutil.copy2(run / name, contract.output_data / "lt" / name)
    say(f"the model is in {contract.model}: {json.dumps(sorted(path.name for path in contract.model.iterdir()))}")
    return 0
