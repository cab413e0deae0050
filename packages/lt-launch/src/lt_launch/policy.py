"""Policy of a launch: when a stage is done, how an attempt ended, when another one may help.

The same file for every target, for Python 3.9 or later without dependencies. A launcher that waits for its nodes
(local, ssh, SageMaker's container) imports it; for Slurm it is copied to `<out>/launch/policy.py` and runs the step:

    policy.py run SPEC -- srun ...      in the batch script: all that follows, for one start of the job

1. A stage that is done already ends with 0. An attempt that nobody concluded was cut short by the queue. If starting
   again would not help (`should_requeue`), the job ends with 75.
2. The command runs with MASTER_ADDR, MASTER_PORT, LT_ATTEMPT and LT_NOTES, a folder where each process leaves its exit
   code. The first USR1 goes on to srun; SIGTERM comes to all processes from Slurm itself.
3. When a process has failed the others may find out themselves (SETTLE_S), then SIGTERM, and SIGKILL after FAILED_S.
   When one has left with 75, or a stop was asked for, the others have the grace time before SIGKILL.
4. The attempt is judged by the exit codes (`judge`), kept in exit.json, and the job put back into the queue with
   `scontrol requeue`, which is asked again while the controller is away.

A stage has a folder `<out>/launch/stages/<stage>/` (an array's element `<stage>.<index>/`): spec.json (what to run, one
for all elements, in `<stage>/`), attempt-000/ (one start: rank-00000.log, exit.json), done.json (the stamp of a stage
that is done). JSON files are written beside their place and renamed; lists are JSON lines.

A stage is done by content, never by the time of day: its stamp has a key (command, environment, recipe, image, index,
fingerprints of the inputs, keys of the stages before it) and fingerprints of its outputs, and both must be the same.
The fingerprint of a file is its size and a SHA-256: of all of it up to 16 MiB, above that of its first and last
mebibyte and its time of change. A folder is its sorted names with theirs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# --- the folder of a stage

ATTEMPT = re.compile(r"attempt-(\d{3,6})")
LAUNCHED = "launched"
"""A file of this name in an attempt's folder: a person has started it, not the launcher after an ending."""
CHECKPOINT = re.compile(r"step-(\d{8,12})")

Table = dict[str, Any]


class Place:
    """The folder of one stage, or of one element of an array stage."""

    def __init__(self, spec_path: Path, index: int | None = None) -> None:
        self.stage = Path(spec_path).absolute().parent
        """The folder of the spec."""
        self.folder = self.stage if index is None else self.stage.with_name(f"{self.stage.name}.{index}")
        self.index = index

    def attempt(self, number: int) -> Path:
        """Return the folder of an attempt."""
        return self.folder / f"attempt-{number:03}"

    def attempts(self) -> list[int]:
        """Return the numbers of all attempts, in order."""
        if not self.folder.is_dir():
            return []
        return sorted(int(match[1]) for name in os.listdir(self.folder) if (match := ATTEMPT.fullmatch(name)))

    def new_attempt(self, *, launched: bool = False) -> int:
        """Make the folder of the next attempt; its number.

        Args:
            launched: whether it is the first of a launch, which begins to count anew.
        """
        number = max(self.attempts(), default=-1) + 1
        self.attempt(number).mkdir(parents=True)
        if launched:
            (self.attempt(number) / LAUNCHED).touch()
        return number

    @property
    def stamp(self) -> Path:
        """The stamp of a stage that is done."""
        return self.folder / "done.json"


def log_file(attempt: Path, rank: int) -> Path:
    """Return the file of what one process wrote."""
    return attempt / f"rank-{rank:05}.log"


def write_text(path: Path, text: str) -> None:
    """Write a small file in full or not at all."""
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}.tmp")
    with open(temporary, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_table(path: Path) -> Table | None:
    """Read a JSON object; None where there is none, or it cannot be read as one."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def write_table(path: Path, values: Table) -> None:
    """Write a JSON object in full or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(values, indent=1, ensure_ascii=False) + "\n")


def run_dir_of(spec: Table) -> str:
    """Return the run directory of a stage that trains; "" of others."""
    return str(Path(spec.get("cwd") or ".") / spec["run_dir"]) if spec.get("run_dir") else ""


def newest_step(run_dir: str) -> int:
    """Return the step of the newest committed checkpoint of a run directory; -1 where there is none."""
    commits = Path(run_dir).glob("checkpoints/step-*/COMMIT") if run_dir else ()
    return max((int(match[1]) for path in commits if (match := CHECKPOINT.fullmatch(path.parent.name))), default=-1)


def completed(run_dir: str, since: int = 0) -> bool:
    """Return True if rank 0 has noted that all steps are done, and nothing began after that.

    Args:
        run_dir: the run directory of lt-trainer.
        since: bytes of events.jsonl that an earlier attempt wrote; they prove nothing about this one.
    """
    path, last = Path(run_dir) / "events.jsonl", ""
    if not path.exists():
        return False
    with open(path, "rb") as file:
        file.seek(since)
        for line in file.read().split(b"\n")[:-1]:
            with contextlib.suppress(ValueError, AttributeError):  # a torn line, or no object
                kind = json.loads(line).get("event")
                last = kind if kind in ("start", "stop", "completed") else last
    return last == "completed"


# --- when a stage is done

WHOLE, PIECE = 16 << 20, 1 << 20


def fingerprint(path: Path) -> str:
    """Return a hash of what a file or folder holds; "missing" where there is none."""
    digest = hashlib.sha256()
    if path.is_dir():
        for folder, names, files in os.walk(path):
            names.sort()
            for name in sorted(files):
                one = Path(folder) / name
                digest.update(f"{one.relative_to(path)}\0{fingerprint(one)}\n".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()
    if not path.is_file():  # opening a pipe would wait
        return "no regular file" if path.exists() else "missing"
    size = path.stat().st_size
    digest.update(str(size).encode())
    with open(path, "rb") as file:
        if size <= WHOLE:
            digest.update(file.read())
        else:
            digest.update(file.read(PIECE))
            file.seek(-PIECE, os.SEEK_END)
            digest.update(file.read(PIECE) + str(path.stat().st_mtime_ns).encode())
    return digest.hexdigest()


def key(spec: Table, place: Place) -> str:
    """Return what decides the result of a stage, as one hash."""
    cwd = Path(spec.get("cwd") or ".")
    stages = place.folder.parent
    before = {}
    for stage in spec.get("after") or []:
        width = stage.get("array") or 0
        names = [f"{stage['name']}.{i}" for i in range(width)] if width else [stage["name"]]
        before.update({name: (read_table(stages / name / "done.json") or {}).get("key") for name in names})
    decides = {
        "argv": spec["argv"],
        "setup": spec.get("setup") or [],
        "env": spec.get("env") or {},
        "recipe": spec.get("recipe") or "",
        "image": spec.get("image") or "",
        "index": place.index,
        "array": spec.get("array") or 0,
        "after": before,
        "inputs": {name: fingerprint(cwd / name) for name in spec.get("inputs") or []},
    }
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()


def outputs(spec: Table) -> dict[str, str]:
    """Return fingerprints of the outputs by name."""
    cwd = Path(spec.get("cwd") or ".")
    return {name: fingerprint(cwd / name) for name in spec.get("outputs") or []}


def done(spec: Table, place: Place) -> bool:
    """Return True if a stage need not run."""
    stamp = read_table(place.stamp)
    if stamp is None or stamp.get("key") != key(spec, place) or stamp.get("outputs") != outputs(spec):
        return False
    return spec.get("completion") != "run_dir" or completed(run_dir_of(spec))


# --- how an attempt ended

REQUEUE, INTERNAL, USER = 75, 70, 64
HUNG = 128 + int(signal.SIGALRM)
"""Exit code of a rank that hung and held Python's lock, so that the kernel's timer ended it: the same as REQUEUE."""
DONE, STOPPED, REQUEUED, LOST, KILLED, FAILED = "done", "stopped", "requeued", "lost", "killed", "failed"
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
BY_A_STOP = tuple(128 + int(number) for number in STOPS)
"""Exit codes of a process that died of a stop signal."""
AGAIN = (REQUEUED, LOST, KILLED)
"""Endings after which another attempt may help."""
CANCELLED, CUT_SHORT = "cancelled", "interrupted"
"""A file beside the spec: a person has cancelled the stage. A key of exit.json: the queue cut the attempt short."""
SIGNALED, KILLED_FILE = "signaled", "killed"
"""Files of an attempt: the first stop signal that was sent to it; processes had to be killed."""
TAIL_LINES = 12
Note = tuple[int, str, float]
"""Exit code, host, time."""
NOTE = re.compile(r"([0-9]{1,3}) ([^\n]*)\n")


def read_notes(folder: Path) -> dict[int, Note]:
    """Read the exit codes that processes have left in a folder, by rank."""
    found: dict[int, Note] = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name.isdigit():
            match = NOTE.fullmatch(path.read_text(encoding="utf-8", errors="replace"))
            if match:  # else it is being written
                found[int(path.name)] = unhung(int(match[1])), match[2], path.stat().st_mtime
    return found


def unhung(code: int) -> int:
    """Return an exit code, REQUEUE for HUNG."""
    return REQUEUE if code == HUNG else code


def judge(
    ranks: Sequence[int], notes: Mapping[int, Note], code: int, *, asked: bool = False, killed: bool = False
) -> tuple[str, int, str, int | None]:
    """Return how an attempt ended: kind, exit code, reason, and the rank that failed first.

    Args:
        ranks: numbers of its processes.
        notes: what they have left.
        code: of what started them (srun).
        asked: whether a stop was asked for.
        killed: whether the policy ended processes itself, which then leave no note.

    Example:
        >>> judge(range(2), {0: (75, "a", 0.0), 1: (137, "b", 0.0)}, 137)[:2], judge([0], {}, 0)[:2]
        (('killed', 137), ('lost', 75))
    """
    code = unhung(code)
    own = [rank for rank, note in notes.items() if note[0] not in (0, REQUEUE)]
    own = [rank for rank in own if not (asked and notes[rank][0] in BY_A_STOP)]
    missing = [] if killed or asked else [rank for rank in ranks if rank not in notes]
    if missing and notes:
        return LOST, REQUEUE, f"{_names(missing)} left no exit code: the node was lost, or killed it", missing[0]
    if own:
        first = min(own, key=lambda rank: (notes[rank][0] not in (USER, INTERNAL), notes[rank][2], rank))
        code, host, _ = notes[first]
        reason = f"rank {first} on {host} was the first to fail: {code_name(code)}"
        return (KILLED if code > 128 else FAILED), code, reason, first
    if asked and (not notes or any(note[0] for note in notes.values()) or len(notes) < len(ranks)):
        return STOPPED, REQUEUE, "stopped as requested" + (", but had to be killed" if killed else ""), None
    again = [rank for rank, note in notes.items() if note[0] == REQUEUE]
    if again:
        first = min(again, key=lambda rank: (notes[rank][2], rank))
        return REQUEUED, REQUEUE, f"rank {first} on {notes[first][1]} was the first to leave with 75", first
    if not notes:
        if code == 0:
            return LOST, REQUEUE, "no process has begun", None
        kind = REQUEUED if code == REQUEUE else KILLED if code > 128 else FAILED
        return kind, code, f"srun ended with {code}, and no process has left an exit code", None
    return DONE, 0, "", None


def _names(ranks: Sequence[int]) -> str:
    return f"ranks {ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"


def code_name(code: int) -> str:
    """Format an exit code for people.

    Example:
        >>> code_name(7), code_name(137)
        ('exit code 7', 'killed by SIGKILL')
    """
    if code <= 128:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(code - 128).name}"
    except ValueError:
        return f"exit code {code}"


def conclude(
    spec: Table,
    place: Place,
    number: int,
    code: int = 0,
    *,
    cut_short: bool = False,
    ranks: Sequence[int] | None = None,
    lost: Table | None = None,
    hosts: Mapping[int, str] | None = None,
) -> Table:
    """Judge an attempt by what it left, stamp the stage where it is done, write exit.json.

    Args:
        spec: what was run.
        place: of the stage.
        number: of the attempt.
        code: of what started its processes.
        cut_short: whether the queue ended it.
        ranks: those to judge by; None = all.
        lost: a node that was lost: host, ranks, and why.
        hosts: names of the ranks' machines, where they are known by others than their own.
    """
    folder, procs = place.attempt(number), int(spec["procs_per_node"])
    ranks = range(int(spec["nodes"]) * procs) if ranks is None else ranks
    notes, asked = read_notes(folder / "notes"), (folder / SIGNALED).exists()
    notes = {rank: (note[0], (hosts or {}).get(rank, note[1]), note[2]) for rank, note in notes.items()}
    killed = (folder / KILLED_FILE).exists()
    kind, code, reason, first = judge(ranks, notes, code, asked=asked, killed=killed)
    if lost and not asked:
        kind, code, first = LOST, REQUEUE, lost["ranks"][0]
        reason = f"host {lost['host']} is lost ({_names(lost['ranks'])}): {lost['why']}"
    start, run_dir = read_table(folder / "start.json") or {}, run_dir_of(spec)
    if kind == DONE and spec.get("completion") == "run_dir" and not completed(run_dir, int(start.get("events", 0))):
        kind, code = FAILED, INTERNAL
        where = f"{spec['run_dir']}/events.jsonl"
        reason = f"every process ended with 0, but rank 0 has not noted in {where} that all steps are done"
    made = outputs(spec) if kind == DONE else {}
    missing = [name for name, found in made.items() if found == "missing"]
    if missing:
        kind, code, reason = FAILED, INTERNAL, f"the stage ended with 0 but did not make {', '.join(missing)}"
    if kind == DONE:  # with the key when it began: what changed while it ran was not what it read
        write_table(place.stamp, {"key": (folder / "key").read_text(encoding="ascii"), "outputs": made})
    result: Table = {"kind": kind, "code": code, "reason": reason, "first": None}
    result.update(step_before=int(start.get("step", -1)), step=newest_step(run_dir))
    if first is not None:
        note = None if kind == LOST else notes.get(first)
        result["first"] = {
            "rank": first,
            "code": None if note is None else note[0] if note[0] <= 128 else 128 - note[0],
            "host": note[1] if note else lost["host"] if lost else "",
            "node": first // procs,
            "tail": last_lines(log_file(folder, first)),
            "log": str(log_file(folder, first)),
        }
    if kind != DONE and (cut_short or asked):
        result[CUT_SHORT] = True
    write_table(folder / "exit.json", result)
    return result


def report(result: Table) -> list[str]:
    """Return the ending of an attempt in some lines, with the last ones of the first failure."""
    first = result.get("first")
    lines = [f"{result['kind']}: {result['reason']}" if result["reason"] else str(result["kind"])]
    if first and first["tail"]:
        lines += [f"the last lines of rank {first['rank']}, from {first['log']}:"]
        lines += [f"    {line}" for line in first["tail"]]
    return lines


def last_lines(path: Path) -> list[str]:
    """Read the last lines of a log."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - (1 << 16)))
            rows = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    return [row for row in rows if row.strip()][-TAIL_LINES:]


def tell(*lines: str) -> None:
    """Write lines into the job's output."""
    sys.stderr.write("".join(f"lt-launch: {line}\n" for line in lines))
    sys.stderr.flush()


# --- whether another attempt may help


def should_requeue(spec: Table, place: Place) -> tuple[bool, str]:
    """Return whether another attempt may help after the newest one, and why or why not.

    An attempt that the queue cut short counts neither as a failure nor against `max_restarts`. Attempts in a row
    without a new checkpoint do count: `max_without_progress` of those that failed, `max_restarts` of all. What happened
    before a person launched the stage again does not count.
    """
    policy = spec.get("restart") or {}
    most, patience = int(policy.get("max_restarts", 0)), int(policy.get("max_without_progress", 1))
    numbers = place.attempts()
    launched = [at for at, number in enumerate(numbers) if (place.attempt(number) / LAUNCHED).exists()]
    numbers = numbers[launched[-1] if launched else 0 :]
    ended = [read_table(place.attempt(number) / "exit.json") or {} for number in numbers]
    cut_short = [  # by the queue, or by a signal that it was asked to send
        one.get("kind") == STOPPED or (bool(one.get(CUT_SHORT)) and one.get("kind") in AGAIN) for one in ended
    ]
    if not cut_short[-1] and ended[-1].get("kind") not in AGAIN:
        return False, f"an attempt that ended as {ended[-1].get('kind', 'unknown')} is not started again"
    failures = cut_short.count(False)
    if failures > most:
        return False, f"{most} of {most} restarts are used up"
    if spec.get("completion") == "run_dir":
        streak: list[bool] = []
        for one, short in reversed(list(zip(ended, cut_short))):  # noqa: B905 - Python 3.9
            if int(one.get("step", -1)) > int(one.get("step_before", -1)):
                break
            streak.append(short)
        if streak.count(False) >= patience or len(streak) > max(most, patience):
            return False, f"{len(streak)} attempt(s) in a row made no new checkpoint; look at the failure first"
    what = "cut short by the queue" if cut_short[-1] else f"ended as {ended[-1]['kind']}"
    return True, f"attempt {numbers[-1]} was {what}; {failures} of {most} restarts are used"


def begin_attempt(spec: Table, place: Place, restarts: int) -> int | None:
    """Return the number of a new attempt; None where there is nothing to start, which `done` tells apart.

    Args:
        spec: what to run.
        place: of the stage.
        restarts: how often the queue has started this job again.
    """
    attempts = place.attempts()
    if attempts and not (place.attempt(attempts[-1]) / "exit.json").exists():
        tell(*report(conclude(spec, place, attempts[-1], cut_short=True)))  # the queue took the nodes away
    if done(spec, place):
        tell("completed already")
        return None
    if restarts and attempts:
        yes, why = should_requeue(spec, place)
        if (place.stage / CANCELLED).exists():
            yes, why = False, "it was cancelled"
        tell(why)
        if not yes:
            return None
    return open_attempt(spec, place, launched=not restarts)


def open_attempt(spec: Table, place: Place, *, launched: bool) -> int:
    """Make the folder of a new attempt, with what it begins from; its number.

    Args:
        spec: what to run.
        place: of the stage.
        launched: whether a person starts it.
    """
    number = place.new_attempt(launched=launched)
    folder = place.attempt(number)
    (folder / "notes").mkdir()
    run_dir = run_dir_of(spec)
    events = Path(run_dir) / "events.jsonl"
    size = events.stat().st_size if run_dir and events.exists() else 0
    write_table(folder / "start.json", {"step": newest_step(run_dir), "events": size})
    write_text(folder / "key", key(spec, place))
    return number


# --- one start of a Slurm job

SETTLE_S, FAILED_S, POLL_S = 3.0, 10.0, 0.5
CONTROLLER_AWAY = ("ontact", "onnection", "ocket", "imed out")
PAUSES_S = (10, 30, 60, 120, 0)
WAIT = "--immediate="
"""Option of srun: the seconds that it may wait for the nodes of the job."""
TASK_LOST = re.compile(r"srun: error: .*: tasks? [\d,-]+: (?!Exited with exit code|unknown)")
"""What srun says of a task that was killed with the shell that would have noted its end."""


def slurm(*words: str) -> str:
    """Return what a command of Slurm prints, asked again while its controller is away; "" if refused."""
    for pause in PAUSES_S:
        result = subprocess.run(words, capture_output=True, text=True, check=False)
        if result.returncode == 0:
            return result.stdout
        tell(f"{' '.join(words)}: {result.stderr.strip()}")
        if not any(word in result.stderr for word in CONTROLLER_AWAY):
            break
        time.sleep(pause)
    return ""


class SlurmStart:
    """One start of the job: from its nodes to its exit code."""

    def __init__(self, spec: Table, place: Place, environ: Mapping[str, str]) -> None:
        self.spec, self.place, self.environ = spec, place, environ
        self.job = environ["SLURM_JOB_ID"]
        self.restarts = int(environ.get("SLURM_RESTART_COUNT") or 0)
        self.folder = place.folder
        self.signal = 0
        self.lost_task = False
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        self.signal = self.signal or number

    def run(self, command: Sequence[str]) -> int:
        """Run the step of the job, conclude it, and requeue the job where that may help; the job's exit code."""
        number = begin_attempt(self.spec, self.place, self.restarts)
        if number is None:
            return 0 if done(self.spec, self.place) else REQUEUE
        self.folder = self.place.attempt(number)
        names = self.environ["SLURM_JOB_NODELIST"]
        write_text(self.folder / "slurm", f"{self.job} {self.restarts} {names}\n")
        nodes = slurm("scontrol", "show", "hostnames", names).split()
        wanted = self.spec["nodes"]
        if len(nodes) != int(wanted):
            tell(f"the job needs {wanted} nodes and got {names}; submit it with --nodes={wanted}")
            return USER
        started = time.monotonic()
        code = REQUEUE if self.signal else self._step(command, self._environment(number, nodes[0]))
        wait_s = next((float(word[len(WAIT) :]) for word in command if word.startswith(WAIT)), float("inf"))
        if code and time.monotonic() - started >= wait_s / 2 and not self._step_id():
            tell("srun got no step on the nodes of the job")  # as after the loss and return of a node: a requeue helps
            code = REQUEUE
        self._note_signal()
        result = conclude(self.spec, self.place, number, code)
        tell(*report(result))
        if result["kind"] == DONE or (self.place.stage / CANCELLED).exists():
            return int(result["code"])
        yes, why = should_requeue(self.spec, self.place)
        tell(why)
        return self._requeue(result["code"]) if yes else int(result["code"])

    def _environment(self, number: int, first: str) -> dict[str, str]:
        """Return the environment of the step: the script's, the job's, and where its processes meet."""
        spec, index = self.spec, self.place.index
        env = {**self.environ, **(spec.get("env") or {})}
        address = re.search(r"NodeAddr=(\S+)", slurm("scontrol", "show", "node", first))
        env["MASTER_ADDR"], env["MASTER_PORT"] = address[1] if address else first, str(free_port(int(self.job)))
        env["LT_CWD"] = spec.get("cwd") or os.getcwd()
        env["LT_ATTEMPT"], env["LT_NOTES"] = str(number), str(self.folder / "notes")
        if int(spec["procs_per_node"]) > 1:
            env.setdefault("OMP_NUM_THREADS", "1")
        env.setdefault("PYTHONUNBUFFERED", "1")
        if index is not None:
            env["LT_ARRAY_INDEX"], env["LT_ARRAY_SIZE"] = str(index), str(spec.get("array") or 0)
        return env

    def _step(self, command: Sequence[str], env: Mapping[str, str]) -> int:
        """Run srun to its end, and end its processes where that is due; its exit code."""
        log = str(self.folder / "rank-%5t.log")
        tell(f"attempt {env['LT_ATTEMPT']}: the output of rank 0 is in {log_file(self.folder, 0)}")
        words = [command[0], f"--output={log}", "--open-mode=append", *command[1:]]
        process = subprocess.Popen(words, env=dict(env), stderr=subprocess.PIPE, text=True, errors="replace")
        reader = threading.Thread(target=self._read, args=(process,), daemon=True)
        reader.start()
        forwarded, step = False, ""
        due: list[tuple[float, signal.Signals]] | None = None
        grace_s = float(self.spec["grace_s"])
        while process.poll() is None:
            if self.signal and not forwarded:
                forwarded = True
                self._note_signal()
                if self.signal == signal.SIGUSR1:  # SIGTERM has come to all processes of the job
                    process.send_signal(signal.SIGUSR1)
                due = [(time.monotonic() + grace_s, signal.SIGKILL)]
            if not self.signal:
                step, before = self._step_id(), step
                if before and step != before:  # restarted in place, as HyperPod's --auto-resume does
                    due, self.lost_task = None, False
                due = self._due(grace_s) if due is None else due
            while due and time.monotonic() >= due[0][0]:
                self._end(due.pop(0)[1])
            time.sleep(POLL_S)
        reader.join(5.0)
        return process.returncode if process.returncode >= 0 else 128 - process.returncode

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            sys.stderr.write(line)
            sys.stderr.flush()
            self.lost_task = self.lost_task or bool(TASK_LOST.search(line))

    def _due(self, grace_s: float) -> list[tuple[float, signal.Signals]] | None:
        """Return what the processes that are left get, and when; None while nothing has ended early."""
        codes = [note[0] for note in read_notes(self.folder / "notes").values()]
        now = time.monotonic()
        if self.lost_task or any(code not in (0, REQUEUE) for code in codes):
            return [(now + SETTLE_S, signal.SIGTERM), (now + SETTLE_S + FAILED_S, signal.SIGKILL)]
        return [(now + grace_s, signal.SIGKILL)] if REQUEUE in codes else None

    def _step_id(self) -> str:
        """Return the number of the newest step; "" before its first process."""
        path = self.folder / "notes" / "step"
        return path.read_text(encoding="ascii").strip() if path.exists() else ""

    def _end(self, number: signal.Signals) -> None:
        step = self._step_id()
        if step:
            if number == signal.SIGKILL:
                (self.folder / KILLED_FILE).touch()
            slurm("scancel", f"--signal={number.name[3:]}", f"{self.job}.{step}")

    def _note_signal(self) -> None:
        if self.signal and not (self.folder / SIGNALED).exists():
            write_text(self.folder / SIGNALED, signal.Signals(self.signal).name)

    def _requeue(self, code: int) -> int:
        """Put the job back into the queue; its exit code."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a requeue brings it to all processes of the job, us included
        state = slurm("scontrol", "-o", "show", "job", self.job)
        if "JobState=RUNNING " not in state:  # it was cancelled, or preempted and is in the queue again
            return REQUEUE if "JobState=PENDING " in state else code
        slurm("scontrol", "requeue", self.job)
        return REQUEUE


def free_port(seed: int) -> int:
    """Return a port of this machine that is free, and the next one, which Neuron's root takes."""
    for port in range(20000 + seed % 20000, 20200 + seed % 20000, 2):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    return 20000 + seed % 20000


def main(arguments: Sequence[str]) -> int:
    """Run the step of a Slurm job; its exit code."""
    if len(arguments) < 4 or arguments[0] != "run" or arguments[2] != "--":
        sys.stderr.write(f"usage: policy.py run SPEC -- srun ...\n\n{__doc__}")
        return USER
    path = Path(arguments[1]).resolve()
    spec = read_table(path)
    if spec is None:
        tell(f"{path} is missing or damaged; submit this script in its own folder, or launch again")
        return USER
    index = os.environ.get("SLURM_ARRAY_TASK_ID")
    return SlurmStart(spec, Place(path, int(index) if index else None), os.environ).run(arguments[3:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
