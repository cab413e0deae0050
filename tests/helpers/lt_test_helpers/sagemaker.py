"""SageMaker's side of a training job on this machine: its API over HTTP, and containers as processes.

`Service` answers CreateTrainingJob, DescribeTrainingJob, StopTrainingJob and CloudWatch's two calls for logs as boto3
sends them. Each job is a thread that keeps the contract of containers: /opt/ml per host (a folder, channels as links),
SIGTERM and 120 s later SIGKILL for a stop and at the time limit, checkpoints restored at the start and copied to S3
while it runs, FailureReason from output/failure, metrics by regex from the output, model.tar.gz at the end. Addresses
in S3 or FSx are folders of this machine.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from lt_launch.policy import write_table

GRACE_PERIOD_S = 120.0
ENTRYPOINT = (sys.executable, "-P", "-m", "lt_launch", "launch", "sagemaker-entrypoint", "--root")


class TrainingJob(threading.Thread):
    """One job, from its request to its end.

    Args:
        request: body of CreateTrainingJob.
        folder: new folder for `hosts/algo-N` (/opt/ml of a container) and `output`.
        folders: folder of this machine by address.
        command: command of a container; the root of its /opt/ml is appended.
    """

    def __init__(
        self, request: dict[str, Any], folder: Path, folders: Mapping[str, Path], command: tuple[str, ...] = ENTRYPOINT
    ) -> None:
        super().__init__()
        self.request, self.folder, self.folders, self.command = request, folder, folders, command
        self.stop_reason = ""
        self.lines: dict[str, list[str]] = {}
        """Output by host."""
        self.metrics: list[tuple[str, str, str]] = []
        """Host, name and value as text of each match."""
        self.description: dict[str, Any] = {**request, "CreationTime": time.time(), "SecondaryStatusTransitions": []}
        self._set_status("Starting", TrainingJobStatus="InProgress")

    def run(self) -> None:
        count = self.request["ResourceConfig"]["InstanceCount"]
        hosts = sorted(f"algo-{number + 1}" for number in range(count))  # as text, like the service
        roots = [self._opt_ml(host, hosts) for host in hosts]
        self._set_status("Training", TrainingStartTime=time.time())
        failed = self._run_containers(roots)
        if self.stop_reason:
            secondary = "MaxRuntimeExceeded" if self.stop_reason == "limit" else "Stopped"
            self._set_status(secondary, TrainingJobStatus="Stopped")
        elif failed:
            host, code = failed
            file = self.folder / "hosts" / host / "output" / "failure"
            text = file.read_text(encoding="utf-8")[:1024] if file.exists() else ""
            reason = f"AlgorithmError: {text}, exit code: {code}"
            self._set_status("Failed", TrainingJobStatus="Failed", FailureReason=reason)
        else:
            self._collect_model(roots)
            self._set_status("Completed", TrainingJobStatus="Completed")

    def stop(self) -> None:
        """Do as StopTrainingJob does."""
        self.stop_reason = self.stop_reason or "asked"

    def _set_status(self, secondary: str, **values: Any) -> None:
        step = {"Status": secondary, "StartTime": time.time(), "StatusMessage": secondary.lower()}
        steps = [*self.description["SecondaryStatusTransitions"], step]
        self.description |= {"SecondaryStatus": secondary, "SecondaryStatusTransitions": steps, **values}

    def _opt_ml(self, host: str, hosts: list[str]) -> Path:
        root = self.folder / "hosts" / host
        for name in ("input/config", "input/data", "model", "output/data", "checkpoints"):
            (root / name).mkdir(parents=True)
        channels = {}
        for channel in self.request["InputDataConfig"]:
            link = root / "input" / "data" / channel["ChannelName"]
            link.symlink_to(self.folders[address_of(channel["DataSource"])], target_is_directory=True)
            channels[link.name] = {"TrainingInputMode": channel["InputMode"], "RecordWrapperType": "None"}
        resources = {"current_host": host, "hosts": hosts, "network_interface_name": "lo"}
        write_table(root / "input/config/hyperparameters.json", self.request["HyperParameters"])
        write_table(root / "input/config/inputdataconfig.json", channels)
        write_table(root / "input/config/resourceconfig.json", resources)
        if "CheckpointConfig" in self.request:
            write_table(root / "input/config/checkpointconfig.json", {"LocalPath": "/opt/ml/checkpoints"})
            shutil.copytree(self._kept(), root / "checkpoints", dirs_exist_ok=True)
        return root

    def _kept(self) -> Path:
        return self.folders[self.request["CheckpointConfig"]["S3Uri"]]

    def _run_containers(self, roots: list[Path]) -> tuple[str, int] | None:
        """Run them to their end; the first that failed, and its exit code."""
        containers: dict[str, subprocess.Popen[str]] = {}
        env = {**os.environ, **self.request.get("Environment", {})}
        env |= {"TRAINING_JOB_NAME": self.request["TrainingJobName"], "SM_MASTER_ADDR": "127.0.0.1"}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            env["SM_MASTER_PORT"] = str(probe.getsockname()[1])
        readers = []
        for root in roots:
            containers[root.name] = container = subprocess.Popen(
                [*self.command, str(root)],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            readers.append(threading.Thread(target=self._read, args=(root.name, container)))
            readers[-1].start()
        limit = time.monotonic() + self.request["StoppingCondition"]["MaxRuntimeInSeconds"]
        failed, killed_at = None, 0.0
        while any(container.poll() is None for container in containers.values()):
            now = time.monotonic()
            if now >= limit:
                self.stop_reason = self.stop_reason or "limit"
            failed = failed or next(((host, one.returncode) for host, one in containers.items() if one.poll()), None)
            if (self.stop_reason or failed) and not killed_at:  # one failed container ends the job
                killed_at = now + GRACE_PERIOD_S
                if self.stop_reason:
                    self._set_status("Stopping", TrainingJobStatus="Stopping")
                _send(containers, signal.SIGTERM)
            if killed_at and now >= killed_at:
                _send(containers, signal.SIGKILL)
            self._keep_checkpoints(roots)
            time.sleep(0.1)
        _send(containers, signal.SIGKILL)  # what outlived the first process of its container
        for reader in readers:
            reader.join()
        self._keep_checkpoints(roots)
        return failed or next(((host, one.returncode) for host, one in containers.items() if one.returncode), None)

    def _read(self, host: str, container: subprocess.Popen[str]) -> None:
        definitions = self.request["AlgorithmSpecification"].get("MetricDefinitions", [])
        lines = self.lines.setdefault(host, [])
        assert container.stdout is not None
        with container.stdout as output:
            for line in output:
                lines.append(line.rstrip("\n"))
                for one in definitions:
                    if match := re.search(one["Regex"], line):
                        self.metrics.append((host, one["Name"], match[1]))

    def _keep_checkpoints(self, roots: list[Path]) -> None:
        """Copy new and changed files of checkpoints to S3, finished or not, as the service does."""
        if "CheckpointConfig" not in self.request:
            return
        for root in roots:
            for path in sorted((root / "checkpoints").rglob("*")):
                target = self._kept() / path.relative_to(root / "checkpoints")
                with suppress(FileNotFoundError):  # gone since it was listed
                    if path.is_file() and (not target.exists() or path.stat().st_mtime_ns != target.stat().st_mtime_ns):
                        target.parent.mkdir(parents=True, exist_ok=True)
                        shutil.copy2(path, target)

    def _collect_model(self, roots: list[Path]) -> None:
        with tarfile.open(self.folder / "model.tar.gz", "w:gz", compresslevel=1) as archive:
            for path in (path for root in roots for path in sorted((root / "model").iterdir())):
                archive.add(path, arcname=path.name)


def _send(containers: Mapping[str, subprocess.Popen[str]], number: signal.Signals) -> None:
    """Signal the first process of each container; a kill ends all of its processes."""
    for container in containers.values():
        with suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(container.pid, number)
            elif container.poll() is None:
                container.send_signal(number)


def address_of(source: Mapping[str, Any]) -> str:
    """Return the address of a request's DataSource."""
    if s3 := source.get("S3DataSource"):
        return s3["S3Uri"]
    system = source["FileSystemDataSource"]
    return f"fsx://{system['FileSystemId']}{system['DirectoryPath']}"


class Service(ThreadingHTTPServer):
    """SageMaker and CloudWatch Logs at one address; the jobs by name are in `jobs`."""

    def __init__(self, folder: Path, folders: Mapping[str, Path]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.folders = folder, folders
        self.jobs: dict[str, TrainingJob] = {}
        self.url = f"http://127.0.0.1:{self.server_port}"

    def CreateTrainingJob(self, body: dict[str, Any]) -> dict[str, Any]:
        name = body["TrainingJobName"]
        if name in self.jobs:
            raise PermissionError("ResourceInUse")
        self.jobs[name] = TrainingJob(body, self.folder / name, self.folders)
        self.jobs[name].start()
        return {"TrainingJobArn": f"arn:aws:sagemaker:us-east-1:123456789012:training-job/{name}"}

    def DescribeTrainingJob(self, body: dict[str, Any]) -> dict[str, Any]:
        return self.jobs[body["TrainingJobName"]].description

    def StopTrainingJob(self, body: dict[str, Any]) -> dict[str, Any]:
        self.jobs[body["TrainingJobName"]].stop()
        return {}

    def DescribeLogStreams(self, body: dict[str, Any]) -> dict[str, Any]:
        prefix = body["logStreamNamePrefix"]
        streams = [f"{name}/{host}-1" for name, job in self.jobs.items() for host in job.lines]
        return {"logStreams": [{"logStreamName": one} for one in streams if one.startswith(prefix)]}

    def GetLogEvents(self, body: dict[str, Any]) -> dict[str, Any]:
        name, _, stream = body["logStreamName"].partition("/")
        lines = self.jobs[name].lines[stream.removesuffix("-1")]
        start = int(body.get("nextToken", 0)) if body.get("startFromHead") else -body["limit"]
        events = [{"timestamp": 0, "message": line} for line in lines[start:]]
        return {"events": events, "nextForwardToken": str(max(start, 0) + len(events))}


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        action = self.headers["X-Amz-Target"].rpartition(".")[2]
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            code, answer = 200, getattr(self.server, action)(body)
        except PermissionError as exc:
            code, answer = 400, {"__type": str(exc), "message": "refused"}
        data = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/x-amz-json-1.1")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        return


@contextmanager
def run_service(folder: Path, folders: Mapping[str, Path]) -> Iterator[Service]:
    """Run a service to the end of the block, then stop its jobs and wait for them."""
    server = Service(folder, folders)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        for job in server.jobs.values():
            job.stop()
            job.join()
        server.shutdown()
        thread.join()
        server.server_close()
