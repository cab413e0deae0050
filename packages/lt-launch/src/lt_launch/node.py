r"""A stage on one node: a shell that starts its processes, tells how they end, and ends them without a launcher.

A stage that trains by a recipe is one `lt train torchrun` per node. Of another stage each process is started as it is,
with the variables that torchrun sets, so that whatever runs under torchrun runs here, and without torch.

The launcher starts `bash -s`, here or at the other end of ssh, writes a script to its standard input and keeps that
open. Nothing else is needed on the node, and no word of a command line or variable is seen in the list of processes.

- Each command runs in the background; its output goes to the log of its first rank in the attempt's folder, which the
  launcher shares. When it has ended, what it left behind (found by a variable in its environment, since torchrun gives
  ranks a session of their own) gets SIGTERM, and SIGKILL after the grace time. Then the shell prints each rank's exit
  code: the one it noted itself, else the command's.
- A keeper reads words from the launcher: the name of a signal for all commands, KILL for all they have started. Where
  the words end, or stop coming over ssh for `silence_s`, the commands get SIGTERM, and SIGKILL after the grace time.

Cost: two idle shells per node and attempt; a look at the environments in /proc when a command has ended.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lt_launch.policy import Place, code_name, log_file
from lt_launch.spec import ARRAY, INDEX, RECIPE

TOKEN = "LT_LAUNCH_TOKEN"
BEAT_S, STUCK_S = 1.0, 10.0
"""Time between two signs of life; after the other, processes that cannot be killed, since they wait for a device, are
left alone."""
TRAIN = ("-P", "-m", "lt_trainer", "run")
"""What follows the interpreter in the command of a stage that trains by a recipe."""

SHELL = r"""
cd -- @folder@ || exit 66
echo lt-began
exec 3<&0 </dev/null 2>/dev/null
trap : HUP INT TERM USR1 USR2
marked() { grep -lsz "^@token@=$1" /proc/[0-9]*/environ; }
end() { for file in $(marked "$2"); do file=${file%/environ}; kill -s "$1" "${file#/proc/}"; done; }
killed() { : > killed; end KILL @mark@; [ -e /proc/self/environ ] || kill -s KILL 0; }
(
  trap "" HUP INT TERM USR1 USR2
  while read -r @silence@ word; do
    case $word in "") ;; KILL) killed ;; *) kill -s "$word" 0 ;; esac
  done
  kill -s TERM 0
  sleep @grace@
  killed
) <&3 >/dev/null & keeper=$!
exec 3<&-
ended() {
  end TERM "$2"
  for ((n = 0; n < 5 * @grace@; n++)); do [ -n "$(marked "$2")" ] || break; sleep 0.2; done
  end KILL "$2"
  code=$1; shift 2
  for rank; do [ -e killed ] || echo "lt-ended $rank $(cat "notes/$rank" || echo "$code")"; done
}
pids=
@commands@
for pid in $pids; do while kill -0 "$pid"; do wait "$pid"; done; done
kill -s KILL $keeper; wait $keeper
echo lt-left
exit 0
"""
"""What the shell runs. A trap of `:` lets it outlive the signals of its group; what it executes has the default."""
COMMAND = r"""
(
  trap : HUP INT TERM USR1 USR2
  ( @start@ ) >> @log@ 2>&1
  ended $? @mark@ @ranks@
) & pids="$pids $!"
"""


@dataclass(frozen=True, kw_only=True)
class Host:
    """A machine, and how a shell on it is started."""

    name: str
    slots: int = 0
    """Processes that may run side by side; 0 = unknown."""
    address: str = "127.0.0.1"
    """At which the other hosts reach it."""
    shell: tuple[str, ...] = ("bash", "-s")
    """Command line whose standard input the shell reads."""
    silence_s: float = 0
    """Silence of the launcher after which it counts as gone; 0 = only the end of its words does."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command on a node, and the ranks that are its processes."""

    ranks: list[int]
    argv: list[str]
    env: dict[str, str]


class Node:
    """A node for one attempt of a stage.

    Args:
        host: the machine.
        place: the stage's folder, the same on the node and here.
        number: number of the attempt.
        spec: the stage.
        commands: what to run, by `node_commands`.
    """

    def __init__(self, host: Host, spec: Mapping[str, Any], place: Place, number: int, commands: list[Command]) -> None:
        self.host = host
        self.began, self.left, self.lost = False, False, ""
        """Whether the shell is there; when no process is left; the reason why the node is lost."""
        self.token = secrets.token_hex(16)
        """Marks what it starts."""
        self._complaints: deque[str] = deque(maxlen=20)
        self._partial, self._beat_at = b"", time.monotonic()
        # A session of its own: Ctrl-C at a terminal would else end it before it could be told what to do.
        self.process = subprocess.Popen(
            host.shell,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        self._say(self._script(spec, place, number, commands))

    def poll(self) -> Iterator[tuple[int, int]]:
        """Yield the ranks that have ended since the last call, with their exit codes."""
        now, code = time.monotonic(), self.process.poll()
        if self.host.silence_s and now - self._beat_at >= BEAT_S:
            self._beat_at = now
            self._say("\n")
        assert self.process.stdout is not None
        while data := self.process.stdout.read(1 << 16):
            self._partial += data
        *rows, self._partial = (self._partial + (b"\n" if code is not None else b"")).split(b"\n")
        for line in (row.decode("utf-8", "replace").strip() for row in rows):
            if match := re.fullmatch(r"lt-ended (\d+) (\d+)\b.*", line):
                yield int(match[1]), int(match[2])
            elif line == "lt-began":
                self.began = True
            elif line == "lt-left":
                self.left = True
            elif line:
                self._complaints.append(line)
        if code is not None and not self.left and not self.lost:
            said = f" ({self._complaints[-1]})" if self._complaints else ""
            self.lost = f"the connection ended with {code_name(code if code >= 0 else 128 - code)}{said}"

    def send(self, number: int) -> None:
        """Send a signal to every command."""
        self._say(signal.Signals(number).name.removeprefix("SIG") + "\n")

    def kill(self) -> None:
        """Kill every process. Exit codes of ranks that are still there are not reported: not their own."""
        self._say("KILL\n")

    def close(self) -> None:
        """End what is left, and the shell."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if not self.left and not self.lost:  # of a lost one the keeper ends what is left, with time to save
            self.kill()
        with suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(STUCK_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()

    def _say(self, text: str) -> None:
        assert self.process.stdin is not None
        with suppress(OSError):  # it is gone; the end of its output says so
            self.process.stdin.write(text.encode("utf-8", "surrogateescape"))
            self.process.stdin.flush()

    def _script(self, spec: Mapping[str, Any], place: Place, number: int, commands: list[Command]) -> str:
        """Return what the shell runs, as one compound command, which it reads whole before it begins."""
        folder, text = place.attempt(number), ""
        for command in commands:
            mark = f"{self.token}-{command.ranks[0]}-"
            values = {
                "start": _start(spec, command, mark),
                "log": shlex.quote(str(log_file(folder, command.ranks[0]))),
                "mark": mark,
                "ranks": " ".join(map(str, command.ranks)),
            }
            text += _fill(COMMAND, values)
        silence = f"-t {round(self.host.silence_s)}" if self.host.silence_s else ""
        values = {"folder": shlex.quote(str(folder)), "token": TOKEN, "mark": self.token, "silence": silence}
        grace = str(max(1, round(float(spec["grace_s"]))))
        return "{" + _fill(SHELL, {**values, "grace": grace, "commands": text}) + "}\n"


def _start(spec: Mapping[str, Any], command: Command, mark: str) -> str:
    """Return the shell's words that replace it by a command."""
    words = [f"cd -- {shlex.quote(spec['cwd'])} || exit"] if spec.get("cwd") else []
    words.append('export PYTHONUNBUFFERED="${PYTHONUNBUFFERED-1}"')
    if int(spec["procs_per_node"]) > 1:
        words.append('export OMP_NUM_THREADS="${OMP_NUM_THREADS-1}"')
    words += [f"export {name}={shlex.quote(value)}" for name, value in {**command.env, TOKEN: mark}.items()]
    if spec.get("bin"):  # commands of the interpreter's own environment (lt) before others
        words.append(f'export PATH={shlex.quote(spec["bin"])}:"$PATH"')
    return "; ".join([*words, f"exec {shlex.join(command.argv)}"])


def _fill(text: str, values: Mapping[str, str]) -> str:
    return re.sub("@([a-z]+)@", lambda found: values[found[1]], text)


def is_training(spec: Mapping[str, Any]) -> bool:
    """Return True if a stage trains by a recipe."""
    return bool(spec.get("recipe")) and tuple(spec["argv"][1:5]) == TRAIN


def node_commands(
    spec: Mapping[str, Any],
    place: Place,
    number: int,
    node: int,
    master: tuple[str, int | str],
    env: Mapping[str, str] | None = None,
) -> list[Command]:
    """Return the commands of a node.

    Args:
        spec: the stage.
        place: its folder.
        number: number of the attempt.
        node: index of the node; rank = node * processes per node + process.
        master: address of the first node and a free port there; a word for it in what is only shown.
        env: further variables.
    """
    procs, nodes = int(spec["procs_per_node"]), int(spec["nodes"])
    ranks, folder = list(range(node * procs, (node + 1) * procs)), place.attempt(number)
    words: dict[str, str] = {RECIPE: str(place.stage / "recipe.toml")}
    # By the run's id a rank knows that who started it waits for it.
    given = {"LT_ATTEMPT": str(number), "TORCHELASTIC_RUN_ID": f"{spec.get('name') or place.stage.name}-{number}"}
    if place.index is not None:
        index, width = str(place.index), str(spec["array"])
        words |= {INDEX: index, ARRAY: width}
        given |= {"LT_ARRAY_INDEX": index, "LT_ARRAY_SIZE": width}
    argv = [str(words.get(word, word)) for word in spec["argv"]]
    given = {**(spec.get("env") or {}), **(env or {}), **given}
    if is_training(spec):
        torchrun = [argv[0], "-P", "-m", "lt_trainer", "torchrun", argv[5], "--nproc-per-node", str(procs), *argv[6:]]
        # On one node, too, the address is given: torchrun would look up that of the host's name.
        torchrun += ["--", f"--nnodes={nodes}", f"--node-rank={node}", "--rdzv-backend=static"]
        torchrun += [f"--master-addr={master[0]}", f"--master-port={master[1]}"]
        notes = {"LT_EXIT_CODES": f"{folder}/notes", "LT_RANK_LOGS": str(folder)}
        return [Command(ranks=ranks, argv=_with_setup(spec, torchrun), env={**given, **notes})]
    identity = {"WORLD_SIZE": nodes * procs, "LOCAL_WORLD_SIZE": procs, "GROUP_RANK": node, "NODE_RANK": node}
    given |= {name: str(value) for name, value in identity.items()}
    given |= {"MASTER_ADDR": master[0], "MASTER_PORT": str(master[1])}
    argv = _with_setup(spec, argv)
    return [
        Command(ranks=[rank], argv=argv, env={**given, "RANK": str(rank), "LOCAL_RANK": str(rank - node * procs)})
        for rank in ranks
    ]


def _with_setup(spec: Mapping[str, Any], argv: list[str]) -> list[str]:
    """Return a command line behind the lines of set-up, in the same shell."""
    setup = spec.get("setup") or []
    return ["bash", "-c", "\n".join([*setup, 'exec "$@"']), "lt-launch", *argv] if setup else argv
