"""Container side of a training job: `lt launch sagemaker-entrypoint`, process 1 of the container.

    1  read the contract, resolve the recipe, compare the tokenizer; a mismatch ends the job with its reason
    2  start `lt train torchrun`, one rank per device, static ranks, rank 0 on the first host (`lt_launch.attempt`)
    3  forward SIGTERM immediately; ranks save within the grace period, the service kills everything after 120 s
    4  after a lost process or exit code 75, restart the attempt in place, as long as checkpoints make progress
    5  on success, export the trained model to /opt/ml/model as a Hugging Face folder (rank 0's host) and exit with 0;
       else write the rank that failed first, its host, exit code and last lines to /opt/ml/output/failure

The network is used only between the hosts. A stopped job exits with 75, never with 0: only a complete model is a
success.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lt_launch import policy
from lt_launch.attempt import Attempt, Stop, handle_stop_signals
from lt_launch.errors import LaunchError
from lt_launch.node import Host
from lt_launch.policy import Place
from lt_launch.sagemaker.container_recipe import procs_per_node, resolve_recipe
from lt_launch.sagemaker.contract import GRACE_PERIOD_S, Contract, read_contract, write_failure
from lt_launch.spec import recipe_hash

MASTER_PORT = 7777
"""Port used by SageMaker's own containers."""
MAX_RESTARTS, MAX_WITHOUT_PROGRESS = 10, 2
DNS_TIMEOUT_S = 120.0
OFFLINE_ENV = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
"""Variables that disable network access of libraries, which would wait for a timeout."""
COPIED = ("metrics.jsonl", "events.jsonl", "recipe.toml", "environment.json")
"""Files of the run directory that are uploaded with the model."""


def run_entrypoint(root: Path, environ: Mapping[str, str], log: Callable[[str], None]) -> int:
    """Train according to the contract below `root`.

    Args:
        root: /opt/ml, or its replacement.
        environ: environment of the container.
        log: receives lines for the log.

    Returns:
        0 success, 75 stopped and saved, else the exit code of the first failure.
    """
    stop = Stop()
    with handle_stop_signals(stop):
        try:
            return _train(read_contract(root, environ), environ, stop, log)
        except BaseException as exc:
            code = getattr(exc, "exit_code", None)
            if isinstance(exc, ValueError) and isinstance(code, int):
                log(f"error: {exc}")
                write_failure(root, str(exc))
                return code
            write_failure(root, f"{type(exc).__name__}: {exc}")
            raise


def _train(contract: Contract, environ: Mapping[str, str], stop: Stop, log: Callable[[str], None]) -> int:
    from lt_trainer.config.recipe import to_toml

    procs, resolved, is_first_host = procs_per_node(environ), resolve_recipe(contract, environ), contract.node_rank == 0
    recipe = resolved.recipe
    output = contract.root / "output" / "data" / "lt"
    output.mkdir(parents=True, exist_ok=True)
    run_toml = output / "run.toml"
    run_toml.write_text(to_toml(recipe, resolved.origins), encoding="utf-8")
    log(
        f"host {contract.current_host}, {contract.node_rank + 1} of {len(contract.hosts)}, {procs} process(es) on it; "
        f"store {recipe.data.store}, run directory {recipe.run.dir}"
    )
    if is_first_host and not contract.has_checkpoint_config and "run" not in contract.channels:
        log("warning: the job has no CheckpointConfig; an unfinished run is lost with the instance")
    spec = {
        "name": "train",
        "argv": [sys.executable, "-P", "-m", "lt_trainer", "run", str(run_toml)],
        "recipe": recipe_hash(run_toml.read_text(encoding="utf-8")),
        "nodes": len(contract.hosts),
        "procs_per_node": procs,
        "env": {},
        "cwd": "",
        "grace_s": GRACE_PERIOD_S,
        "run_dir": recipe.run.dir,
        "completion": "run_dir" if is_first_host else "exit",  # other hosts may see the run directory too early
        "restart": {"max_restarts": MAX_RESTARTS, "max_without_progress": MAX_WITHOUT_PROGRESS},
    }
    env = {**environ, **OFFLINE_ENV}
    if contract.network_interface:
        env |= dict.fromkeys(("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"), contract.network_interface)
    code = run_attempts(contract, spec, env, stop, log)
    return _export_model(contract.root, Path(recipe.run.dir), env, log) if code == 0 and is_first_host else code


def run_attempts(
    contract: Contract, spec: dict[str, Any], environ: Mapping[str, str], stop: Stop, log: Callable[[str], None]
) -> int:
    """Run attempts on this host; report a failure and return the exit code of the last one."""
    path = contract.root / "output" / "data" / "lt" / "stages" / "train" / "spec.json"
    policy.write_table(path, spec)
    place, first, host = Place(path), True, Host(name=contract.current_host)
    _wait_for_dns(contract.master_addr, stop)
    while True:
        number, first = policy.open_attempt(spec, place, launched=first), False
        result = Attempt(
            spec=spec,
            place=place,
            number=number,
            hosts=[host],
            first_node=contract.node_rank,
            master=(contract.master_addr, int(environ.get("SM_MASTER_PORT", MASTER_PORT))),
            env=environ,
            stop=stop,
            show=_show,
        ).run()
        log("\n".join(policy.report(result)))
        if result["kind"] == policy.DONE:
            return 0
        if stop.number:
            log(f"stopped by {signal.Signals(stop.number).name}: {result['reason']}")
            if result["code"] == policy.REQUEUE:
                return policy.REQUEUE
        else:
            should_restart, reason = policy.should_requeue(spec, place)
            log(f"restarting: {reason}" if should_restart else reason)
            if should_restart:
                continue
        write_failure(contract.root, str(result["reason"]), (result["first"] or {}).get("tail", []))
        return int(result["code"]) or policy.INTERNAL


def _show(lines: str) -> None:
    """Write lines of the first rank of this host to the log of the container."""
    sys.stdout.write(lines)
    sys.stdout.flush()


def _wait_for_dns(host: str, stop: Stop) -> None:
    """Wait until the name of rank 0's host resolves: the service registers names as hosts start.

    Raises:
        LaunchError: it did not within DNS_TIMEOUT_S; ranks would wait for it forever.
    """
    deadline = time.monotonic() + DNS_TIMEOUT_S
    while not stop.number:
        try:
            socket.getaddrinfo(host, None)
        except OSError as exc:
            if time.monotonic() > deadline:
                text = f"the name of the first host, {host}, has no address: {exc}"
                raise LaunchError(text, exit_code=policy.REQUEUE) from exc
            time.sleep(1)
        else:
            return


def _export_model(root: Path, run: Path, environ: Mapping[str, str], log: Callable[[str], None]) -> int:
    """Export the trained model as a Hugging Face folder into /opt/ml/model, which may be a mount."""
    model = root / "model"
    temporary = model / ".lt-export"
    if temporary.exists():  # left by an interrupted export
        shutil.rmtree(temporary)
    model.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-P", "-m", "lt_ckpt", "export", str(run), "--out", str(temporary)]
    code = subprocess.run(command, env=dict(environ), check=False).returncode
    if code:
        write_failure(root, f"training completed, but the model could not be exported (exit code {code})")
        return code
    for path in sorted(temporary.iterdir()):
        os.replace(path, model / path.name)
    temporary.rmdir()
    for name in COPIED:
        if (run / name).exists():
            shutil.copy2(run / name, root / "output" / "data" / "lt" / name)
    log(f"the model is in {model}: {', '.join(sorted(path.name for path in model.iterdir()))}")
    return 0
