"""The service's side of the contract with processes of this machine: `python -m lt_launch.sagemaker.emulator JOB`.

One process stands for the service and runs one job to its end. JOB is a folder with `request.json`; what happens is in
`job.json`, which reads as DescribeTrainingJob answers, and everything else beside it:

    hosts/algo-N/           what is /opt/ml for a host: channels as links, config files, model, checkpoints, output
    logs/algo-N.log         what its container writes (CloudWatch's stream)
    metrics.jsonl           what the metric regexes found in those lines (CloudWatch's metrics)
    output/                 model.tar.gz, or plain files with CompressionType NONE
    CHECKPOINTS             restored at the start and copied to all the time, where the job has a CheckpointConfig

An address s3://BUCKET/FOLDER means a local folder: `addresses.json` in JOB says which. SIGTERM stands for
StopTrainingJob: the containers get SIGTERM, 120 s, SIGKILL; the same at MaxRuntimeInSeconds. With network isolation
the containers run in a network of their own that has nothing but itself, where the system lets us make one.
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
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lt_launch.agent.places import read_table, write_table
from lt_launch.sagemaker.failure import LIMIT

__all__ = ["GRACE_S", "Emulator", "isolation"]

GRACE_S = 120.0
SYNC_S = 1.0
ISOLATE = ["unshare", "--net", "--", "sh", "-c", 'ip link set lo up && exec "$@"', "isolated"]


def isolation() -> list[str]:
    """What to put in front of a command so that it has no network; empty where that cannot be done."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return []
    done = subprocess.run([*ISOLATE, "true"], capture_output=True, check=False)
    return ISOLATE if done.returncode == 0 else []


class Emulator:
    """One job.

    Args:
        job: its folder.
        grace_s: from SIGTERM to SIGKILL.
    """

    def __init__(self, job: Path, grace_s: float = GRACE_S) -> None:
        self.job, self.grace_s = job, grace_s
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

    def _become(self, secondary: str, message: str, **values: Any) -> None:
        """The next secondary status, as describe shows it."""
        now, before = time.time(), self.status["SecondaryStatusTransitions"]
        if before:
            before[-1].setdefault("EndTime", now)
        before.append({"Status": secondary, "StartTime": now, "StatusMessage": message})
        self.status |= {"SecondaryStatus": secondary, "LastModifiedTime": now, **values}
        write_table(self.job / "job.json", self.status)

    def run(self) -> int:
        """The whole job; 0 when it is Completed."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._stop("StopTrainingJob"))
        self._become("Starting", "Preparing the processes that stand for instances")
        try:
            self._become("Downloading", "Laying out the input")
            roots = [self._lay_out(host) for host in self._hosts()]
            if not self.stop_reason:
                self._become("Training", "Training in progress", TrainingStartTime=time.time())
                codes = self._train(roots)
                self._become("Uploading", "Collecting model and output")
                self._collect(roots)
                return self._end(roots, codes)
        except OSError as exc:
            self._become("Failed", str(exc), TrainingJobStatus="Failed", FailureReason=f"InternalServerError: {exc}")
            return 1
        return self._end([], [])

    def _end(self, roots: list[Path], codes: list[int]) -> int:
        now = time.time()
        began = self.status.get("TrainingStartTime", now)
        self.status |= {"TrainingEndTime": now, "TrainingTimeInSeconds": int(now - began)}
        self.status["FinalMetricDataList"] = list(self._metrics.values())
        if self.stop_reason:
            secondary = "MaxRuntimeExceeded" if self.stop_reason == "MaxRuntime" else "Stopped"
            self._become(secondary, "The job was stopped", TrainingJobStatus="Stopped")
            return 1
        if any(codes):
            bad = self._failed if self._failed is not None else next(at for at, code in enumerate(codes) if code)
            file = roots[bad] / "output" / "failure"
            text = file.read_text(encoding="utf-8", errors="replace")[:LIMIT] if file.exists() else ""
            reason = f"AlgorithmError: {text}, exit code: {codes[bad]}"
            self._become("Failed", "Training failed", TrainingJobStatus="Failed", FailureReason=reason)
            return 1
        self._become("Completed", "Training job completed", TrainingJobStatus="Completed")
        return 0

    # --- the containers' side of things

    def _hosts(self) -> list[str]:
        return [f"algo-{number + 1}" for number in range(self.request["ResourceConfig"]["InstanceCount"])]

    def _lay_out(self, host: str) -> Path:
        """What the service puts into a container."""
        root, config = self.job / "hosts" / host, self.job / "hosts" / host / "input" / "config"
        for name in ("input/config", "input/data", "model", "output/data", "checkpoints"):
            (root / name).mkdir(parents=True, exist_ok=True)
        channels: dict[str, Any] = {}
        for channel in self.request.get("InputDataConfig", []):
            name = channel["ChannelName"]
            link = root / "input" / "data" / name
            link.unlink(missing_ok=True)
            link.symlink_to(self._local(channel["DataSource"]), target_is_directory=True)
            channels[name] = {
                "TrainingInputMode": channel.get("InputMode", "File"),
                "S3DistributionType": "FullyReplicated",
                "RecordWrapperType": "None",
            }
        hosts = sorted(self._hosts())  # the service sorts names as text
        resources = {
            "current_host": host,
            "hosts": hosts,
            "network_interface_name": "lo",
            "current_instance_type": "local",
            "current_group_name": "homogeneousCluster",
        }
        write_table(config / "hyperparameters.json", self.request.get("HyperParameters", {}))
        write_table(config / "inputdataconfig.json", channels)
        write_table(config / "resourceconfig.json", resources)
        if "CheckpointConfig" in self.request:
            write_table(config / "checkpointconfig.json", {"LocalPath": "/opt/ml/checkpoints"})
            kept = self._checkpoints()
            if kept is not None and kept.is_dir():
                shutil.copytree(kept, root / "checkpoints", dirs_exist_ok=True)
        return root

    def _local(self, source: Mapping[str, Any]) -> Path:
        s3, system = source.get("S3DataSource"), source.get("FileSystemDataSource")
        address = s3["S3Uri"] if s3 else f"{system['FileSystemId']}:{system['DirectoryPath']}" if system else ""
        return Path(self.addresses[address])

    def _checkpoints(self) -> Path | None:
        address = self.request.get("CheckpointConfig", {}).get("S3Uri")
        return Path(self.addresses[address]) if address in self.addresses else None

    def _train(self, roots: list[Path]) -> list[int]:
        (self.job / "logs").mkdir(exist_ok=True)
        front = isolation() if self.request.get("EnableNetworkIsolation") and len(roots) == 1 else []
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
            command = [*front, *self.command(root)]
            container = subprocess.Popen(
                command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
            )
            self._containers.append(container)
            reader = threading.Thread(target=self._read, args=(root.name, container))
            reader.start()
            readers.append(reader)
        self._watch(roots)
        for reader in readers:
            reader.join()
        codes = [container.wait() for container in self._containers]
        return [code if code >= 0 else 128 - code for code in codes]

    def command(self, root: Path) -> list[str]:
        """What runs in a container."""
        return [sys.executable, "-m", "lt_launch", "launch", "sagemaker-entry", "--root", str(root)]

    def _watch(self, roots: list[Path]) -> None:
        """Until all containers have ended: checkpoints, time limit, and the end of the grace time."""
        limit = time.monotonic() + self.request["StoppingCondition"]["MaxRuntimeInSeconds"]
        synced = 0.0
        while any(container.poll() is None for container in self._containers):
            now = time.monotonic()
            self._bury()
            if now >= limit and not self.stop_reason:
                self._stop("MaxRuntime")
            if self.stop_reason and not self._stopped_at:
                self._stopped_at = now
                self._become("Stopping", "Stopping the job", TrainingJobStatus="Stopping")
                self._signal(signal.SIGTERM)
            if self._failed is None:
                self._failed = next((at for at, one in enumerate(self._containers) if one.poll()), None)
                if self._failed is not None and not self._stopped_at:  # one that fails ends the job of all
                    self._stopped_at = now
                    self._signal(signal.SIGTERM)
            if self._stopped_at and now >= self._stopped_at + self.grace_s:
                self._signal(signal.SIGKILL)
            if now - synced >= SYNC_S:
                self._sync(roots)
                synced = time.monotonic()
            time.sleep(0.1)
        self._bury()
        self._sync(roots)

    def _bury(self) -> None:
        """What a container has left running when its first process ended: a container's end is the end of all in it."""
        for container in self._containers:
            if container.poll() is not None:
                with suppress(ProcessLookupError):
                    os.killpg(container.pid, signal.SIGKILL)

    def _signal(self, number: int) -> None:
        for container in self._containers:
            if container.poll() is None:
                with suppress(ProcessLookupError):
                    if number == signal.SIGKILL:
                        os.killpg(container.pid, number)
                    os.kill(container.pid, number)

    def _stop(self, reason: str) -> None:
        self.stop_reason = self.stop_reason or reason

    def _read(self, host: str, container: subprocess.Popen[bytes]) -> None:
        """Lines of a container into its log, and what the metric regexes find in them."""
        definitions = self.request["AlgorithmSpecification"].get("MetricDefinitions", [])
        regexes = [(one["Name"], re.compile(one["Regex"])) for one in definitions]
        assert container.stdout is not None
        with (
            open(self.job / "logs" / f"{host}.log", "ab") as log,
            open(self.job / "metrics.jsonl", "a", encoding="utf-8") as metrics,
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

    def _sync(self, roots: list[Path]) -> None:
        """Checkpoints of every host to where they are kept; what is being written is sent with the next round."""
        kept = self._checkpoints()
        if kept is None:
            return
        for root in roots:
            for path in sorted((root / "checkpoints").rglob("*")):
                target = kept / path.relative_to(root / "checkpoints")
                with suppress(FileNotFoundError):
                    if path.is_file() and not (target.exists() and _same(path, target)):
                        target.parent.mkdir(parents=True, exist_ok=True)
                        shutil.copy2(path, target)

    def _collect(self, roots: list[Path]) -> None:
        output = self.job / "output"
        output.mkdir(exist_ok=True)
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


def _same(one: Path, other: Path) -> bool:
    a, b = one.stat(), other.stat()
    return a.st_size == b.st_size and a.st_mtime_ns == b.st_mtime_ns


def _free_port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def main() -> int:
    """Run the job of the folder that is named."""
    grace = os.environ.get("LT_SM_GRACE_S", "")
    return Emulator(Path(sys.argv[1]), float(grace) if grace else GRACE_S).run()


if __name__ == "__main__":
    sys.exit(main())
