"""Emulator of SageMaker's side of the contract: `python -m lt_launch.sagemaker.emulator JOB`.

One process emulates the service and runs one job to its end. JOB is a folder with `request.json`; the state is in
`job.json`, in the format of DescribeTrainingJob, next to the other files:

    hosts/algo-N/           /opt/ml of a host: channels as links, config files, model, checkpoints, output
    logs/algo-N.log         output of its container (CloudWatch's stream)
    metrics.jsonl           matches of the metric regexes in those lines (CloudWatch's metrics)
    output/                 model.tar.gz, or plain files with CompressionType NONE; where a folder stands for the output
                            path, they are in FOLDER/NAME/output instead, NAME being the training job's
    CHECKPOINTS             restored at the start, copied to continuously, if the job has a CheckpointConfig

`addresses.json` in JOB maps addresses s3://BUCKET/FOLDER to local folders. SIGTERM emulates StopTrainingJob: the
containers get SIGTERM, and SIGKILL after 120 s; the same at MaxRuntimeInSeconds. With network isolation the containers
run in a network namespace of their own, where the system permits one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from lt_launch.policy import open_for_appending, read_table, write_table
from lt_launch.sagemaker.addresses import address_of
from lt_launch.sagemaker.contract import ROOT, resolve_path
from lt_launch.sagemaker.failure import FAILURE_REASON_LIMIT

__all__ = ["GRACE_PERIOD_S", "TrainingJobEmulator", "network_isolation_prefix"]

GRACE_PERIOD_S = 120.0
SYNC_INTERVAL_S = 1.0
UNSHARE_COMMAND = ["unshare", "--net", "--", "sh", "-c", 'ip link set lo up && exec "$@"', "isolated"]


def network_isolation_prefix() -> list[str]:
    """Return the command prefix that runs a command without network; empty if unsupported."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return []
    result = subprocess.run([*UNSHARE_COMMAND, "true"], capture_output=True, check=False)
    return UNSHARE_COMMAND if result.returncode == 0 else []


class TrainingJobEmulator:
    """Emulated training job.

    Args:
        job: folder of the job.
        grace_period_s: seconds from SIGTERM to SIGKILL.
    """

    def __init__(self, job: Path, grace_period_s: float = GRACE_PERIOD_S) -> None:
        self.job, self.grace_period_s = job, grace_period_s
        self.request: dict[str, Any] = json.loads((job / "request.json").read_bytes())
        self.addresses: dict[str, str] = read_table(job / "addresses.json") or {}
        self.status: dict[str, Any] = {**self.request, "TrainingJobStatus": "InProgress"}
        self.status |= {"SecondaryStatusTransitions": [], "CreationTime": time.time(), "FinalMetricDataList": []}
        self.stop_reason = ""
        self._containers: list[subprocess.Popen[bytes]] = []
        self._stopped_at = 0.0
        self._failed: int | None = None
        """The container that was the first to end with another code than 0."""
        self._metrics: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()

    # --- status

    def _set_status(self, secondary: str, message: str, **values: Any) -> None:
        """Append a secondary status to job.json."""
        now, transitions = time.time(), self.status["SecondaryStatusTransitions"]
        if transitions:
            transitions[-1].setdefault("EndTime", now)
        transitions.append({"Status": secondary, "StartTime": now, "StatusMessage": message})
        self.status |= {"SecondaryStatus": secondary, "LastModifiedTime": now, **values}
        write_table(self.job / "job.json", self.status)

    def run(self) -> int:
        """Run the job to its end; return 0 if it is Completed."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._request_stop("StopTrainingJob"))
        self._set_status("Starting", "Preparing the processes that emulate instances")
        try:
            self._set_status("Downloading", "Preparing the input")
            roots = [self._create_opt_ml(host) for host in self._host_names()]
            if not self.stop_reason:
                self._set_status("Training", "Training in progress", TrainingStartTime=time.time())
                codes = self._run_containers(roots)
                self._set_status("Uploading", "Collecting model and output")
                self._collect_outputs(roots)
                return self._finish(roots, codes)
        except OSError as exc:
            self._set_status(
                "Failed", str(exc), TrainingJobStatus="Failed", FailureReason=f"InternalServerError: {exc}"
            )
            return 1
        return self._finish([], [])

    def _finish(self, roots: list[Path], codes: list[int]) -> int:
        now = time.time()
        started_at = self.status.get("TrainingStartTime", now)
        self.status |= {"TrainingEndTime": now, "TrainingTimeInSeconds": int(now - started_at)}
        self.status["FinalMetricDataList"] = list(self._metrics.values())
        if self.stop_reason:
            secondary = "MaxRuntimeExceeded" if self.stop_reason == "MaxRuntime" else "Stopped"
            self._set_status(secondary, "The job was stopped", TrainingJobStatus="Stopped")
            return 1
        if any(codes):
            failed = (
                self._failed if self._failed is not None else next(index for index, code in enumerate(codes) if code)
            )
            file = roots[failed] / "output" / "failure"
            text = file.read_text(encoding="utf-8", errors="replace")[:FAILURE_REASON_LIMIT] if file.exists() else ""
            reason = f"AlgorithmError: {text}, exit code: {codes[failed]}"
            self._set_status("Failed", "Training failed", TrainingJobStatus="Failed", FailureReason=reason)
            return 1
        self._set_status("Completed", "Training job completed", TrainingJobStatus="Completed")
        return 0

    # --- containers

    def _host_names(self) -> list[str]:
        return [f"algo-{number + 1}" for number in range(self.request["ResourceConfig"]["InstanceCount"])]

    def _create_opt_ml(self, host: str) -> Path:
        """Create the /opt/ml of a container; return its root."""
        root, config = self.job / "hosts" / host, self.job / "hosts" / host / "input" / "config"
        for name in ("input/config", "input/data", "model", "output/data", "checkpoints"):
            (root / name).mkdir(parents=True, exist_ok=True)
        channels: dict[str, Any] = {}
        for channel in self.request.get("InputDataConfig", []):
            name = channel["ChannelName"]
            link = root / "input" / "data" / name
            link.unlink(missing_ok=True)
            link.symlink_to(self.addresses[address_of(channel["DataSource"])], target_is_directory=True)
            channels[name] = {
                "TrainingInputMode": channel.get("InputMode", "File"),
                "S3DistributionType": "FullyReplicated",
                "RecordWrapperType": "None",
            }
        hosts = sorted(self._host_names())  # as strings, like the service
        resources = {
            "current_host": host,
            "hosts": hosts,
            "network_interface_name": "lo",
            "current_instance_type": "local",
            "current_group_name": "homogeneousCluster",
            "instance_groups": [
                {"instance_group_name": "homogeneousCluster", "instance_type": "local", "hosts": hosts},
            ],
        }
        write_table(config / "hyperparameters.json", self.request.get("HyperParameters", {}))
        write_table(config / "inputdataconfig.json", channels)
        write_table(config / "resourceconfig.json", resources)
        if "CheckpointConfig" in self.request:
            write_table(config / "checkpointconfig.json", {"LocalPath": self._checkpoint_path()})
            stored, folder = self._checkpoint_storage(), self._checkpoint_folder(root)
            folder.mkdir(parents=True, exist_ok=True)
            if stored is not None and stored.is_dir():
                shutil.copytree(stored, folder, dirs_exist_ok=True)
        return root

    def _checkpoint_path(self) -> str:
        """Return the path of the checkpoints in a container."""
        return self.request.get("CheckpointConfig", {}).get("LocalPath") or f"{ROOT}/checkpoints"

    def _checkpoint_folder(self, root: Path) -> Path:
        """Return the folder of a container's checkpoints; one outside /opt/ml is that of this machine."""
        return resolve_path(root, self._checkpoint_path())

    def _checkpoint_storage(self) -> Path | None:
        address = self.request.get("CheckpointConfig", {}).get("S3Uri")
        return Path(self.addresses[address]) if address in self.addresses else None

    def _output_folder(self) -> Path:
        """Return the folder of the results: below that of the output path, else in the job's folder."""
        folder = self.addresses.get(self.request["OutputDataConfig"]["S3OutputPath"])
        return Path(folder) / self.request["TrainingJobName"] / "output" if folder else self.job / "output"

    def _run_containers(self, roots: list[Path]) -> list[int]:
        (self.job / "logs").mkdir(exist_ok=True)
        prefix = network_isolation_prefix() if self.request.get("EnableNetworkIsolation") and len(roots) == 1 else []
        port = _free_port()
        readers = []
        for root in roots:
            environ = {
                **os.environ,
                **self.request.get("Environment", {}),
                "TRAINING_JOB_NAME": self.request["TrainingJobName"],
                "SM_MASTER_ADDR": "127.0.0.1",
                "SM_MASTER_PORT": str(port),
            }
            command = [*prefix, *self.container_command(root)]
            container = subprocess.Popen(
                command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
            )
            self._containers.append(container)
            reader = threading.Thread(target=self._read_output, args=(root.name, container))
            reader.start()
            readers.append(reader)
        self._supervise(roots)
        for reader in readers:
            reader.join()
        codes = [container.wait() for container in self._containers]
        return [code if code >= 0 else 128 - code for code in codes]

    def container_command(self, root: Path) -> list[str]:
        """Return the command of a container."""
        return [sys.executable, "-P", "-m", "lt_launch", "launch", "sagemaker-entrypoint", "--root", str(root)]

    def _supervise(self, roots: list[Path]) -> None:
        """Supervise the containers to their end: checkpoints, time limit and grace period."""
        limit = time.monotonic() + self.request["StoppingCondition"]["MaxRuntimeInSeconds"]
        synced_at = 0.0
        while any(container.poll() is None for container in self._containers):
            now = time.monotonic()
            self._kill_orphans()
            if now >= limit and not self.stop_reason:
                self._request_stop("MaxRuntime")
            if self.stop_reason and not self._stopped_at:
                self._stopped_at = now
                self._set_status("Stopping", "Stopping the job", TrainingJobStatus="Stopping")
                self._send_signal(signal.SIGTERM)
            if self._failed is None:
                self._failed = next((index for index, one in enumerate(self._containers) if one.poll()), None)
                if self._failed is not None and not self._stopped_at:  # one failed container ends the job
                    self._stopped_at = now
                    self._send_signal(signal.SIGTERM)
            if self._stopped_at and now >= self._stopped_at + self.grace_period_s:
                self._send_signal(signal.SIGKILL)
            if now - synced_at >= SYNC_INTERVAL_S:
                self._sync_checkpoints(roots)
                synced_at = time.monotonic()
            time.sleep(0.1)
        self._kill_orphans()
        self._sync_checkpoints(roots)

    def _kill_orphans(self) -> None:
        """Kill processes that outlived the first process of their container."""
        for container in self._containers:
            if container.poll() is not None:
                with suppress(ProcessLookupError):
                    os.killpg(container.pid, signal.SIGKILL)

    def _send_signal(self, number: int) -> None:
        for container in self._containers:
            if container.poll() is None:
                with suppress(ProcessLookupError):
                    if number == signal.SIGKILL:
                        os.killpg(container.pid, number)
                    os.kill(container.pid, number)

    def _request_stop(self, reason: str) -> None:
        self.stop_reason = self.stop_reason or reason

    def _read_output(self, host: str, container: subprocess.Popen[bytes]) -> None:
        """Write a container's output lines to its log, and their metrics to metrics.jsonl."""
        definitions = self.request["AlgorithmSpecification"].get("MetricDefinitions", [])
        regexes = [(one["Name"], re.compile(one["Regex"])) for one in definitions]
        assert container.stdout is not None
        with (
            os.fdopen(open_for_appending(self.job / "logs" / f"{host}.log"), "ab") as log,
            os.fdopen(open_for_appending(self.job / "metrics.jsonl"), "a", encoding="utf-8") as metrics,
        ):
            for line in container.stdout:
                log.write(line)
                log.flush()
                text = line.decode("utf-8", "replace")
                for name, regex in regexes:
                    if match := regex.search(text):
                        point = {"MetricName": name, "Value": match[1], "Timestamp": time.time()}
                        with self._lock:
                            self._metrics[name] = point
                            metrics.write(json.dumps({**point, "Host": host}) + "\n")
                            metrics.flush()

    def _sync_checkpoints(self, roots: list[Path]) -> None:
        """Copy the checkpoints of every host to storage; incomplete files follow in the next round."""
        storage = self._checkpoint_storage()
        if storage is None:
            return
        for folder in map(self._checkpoint_folder, roots):
            for path in sorted(folder.rglob("*")):
                target = storage / path.relative_to(folder)
                with suppress(FileNotFoundError):
                    if path.is_file() and not (target.exists() and _is_unchanged(path, target)):
                        target.parent.mkdir(parents=True, exist_ok=True)
                        shutil.copy2(path, target)

    def _collect_outputs(self, roots: list[Path]) -> None:
        output = self._output_folder()
        output.mkdir(parents=True, exist_ok=True)
        plain = self.request["OutputDataConfig"].get("CompressionType") == "NONE"
        models = [root / "model" for root in roots if any((root / "model").iterdir())]
        if plain:
            for model in models:
                shutil.copytree(model, output / "model", dirs_exist_ok=True)
        elif models:
            with tarfile.open(output / "model.tar.gz", "w:gz", compresslevel=1) as archive:
                for model in models:
                    for path in sorted(model.iterdir()):
                        archive.add(path, arcname=path.name)
        for root in roots:
            shutil.copytree(root / "output" / "data", output / "data" / root.name, dirs_exist_ok=True)
        self.status["ModelArtifacts"] = {"S3ModelArtifacts": str(output / ("model" if plain else "model.tar.gz"))}


def _is_unchanged(one: Path, other: Path) -> bool:
    a, b = one.stat(), other.stat()
    return a.st_size == b.st_size and a.st_mtime_ns == b.st_mtime_ns


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main() -> int:
    """Run the job in the given folder."""
    grace = os.environ.get("LT_SM_GRACE_S", "")
    return TrainingJobEmulator(Path(sys.argv[1]), float(grace) if grace else GRACE_PERIOD_S).run()


if __name__ == "__main__":
    sys.exit(main())
