r"""The processes of one node: a shell that starts them, tells how they end, and ends them when the launcher is gone.

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
import socket
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lt_launch.policy import Table, code_name, log_file

TOKEN = "LT_LAUNCH_TOKEN"
BEAT_S = 1.0
LINES_BYTES = 1 << 16
STUCK_S = 10.0
"""After this time processes that cannot be killed, since they wait for a device, are left alone."""
FREE_PORT = "import socket; probe = socket.socket(); probe.bind(('', 0)); print(probe.getsockname()[1])"

SHELL = r"""
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


class Node:
    """A node for one attempt of a stage.

    Args:
        argv: what starts `bash -s` there.
        folder: the attempt's, the same on the node and here.
        grace_period_s: what processes have to leave by themselves when their command, or who started it, is gone.
        python: interpreter there that finds a free port; "" = the node is this machine.
        silence_s: silence of the launcher after which it counts as gone; 0 = only the end of its words does.
    """

    def __init__(
        self, argv: Sequence[str], folder: Path, grace_period_s: float, *, python: str = "", silence_s: float = 0
    ) -> None:
        self.left, self.lost = False, ""
        """True when no process is left; the reason why the node is lost."""
        self.token = secrets.token_hex(16)
        """Marks what it starts."""
        self.complaints: deque[str] = deque(maxlen=20)
        """Last lines of ssh and the shell."""
        self.port = 0 if python else free_port()
        """A free port; 0 while the node has not answered."""
        self._folder, self._grace, self._silence = folder, max(1, round(grace_period_s)), round(silence_s)
        self._partial, self._shown, self._offset, self._beat_at = b"", None, 0, time.monotonic()
        # A session of its own: Ctrl-C at a terminal would else end it before it could be told what to do.
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        self._say(f"cd -- {shlex.quote(str(folder))} || exit 66\n")
        if python:
            self._say(f'port=$({shlex.join([python, "-c", FREE_PORT])}) && echo "lt-port $port" || exit 66\n')

    def start(self, orders: Sequence[Mapping[str, Any]], shown_rank: int | None) -> None:
        """Start commands.

        Args:
            orders: of each command: ranks, argv, env, defaults (variables that are set only if they are not), bin
                (first folder of PATH), cwd.
            shown_rank: the rank whose output `poll` returns; None for none.
        """
        self._say(shell_script(orders, self._folder, self.token, self._grace, self._silence))
        self._shown = None if shown_rank is None else log_file(self._folder, shown_rank)

    def poll(self) -> list[Table]:
        """Return what has happened: {"ended": rank, "code": number}, {"lines": text}."""
        now, found = time.monotonic(), []
        if self._silence and now - self._beat_at >= BEAT_S:
            self._beat_at = now
            self._say("\n")
        code = self.process.poll()
        for line in self._answers(is_last=code is not None):
            words = line.split()
            if words[:1] == ["lt-port"]:
                self.port = int(words[1])
            elif words[:1] == ["lt-ended"]:
                found.append({"ended": int(words[1]), "code": int(words[2])})
            elif words == ["lt-left"]:
                self.left = True
            elif words:
                self.complaints.append(line)
        if code is not None and not self.left and not self.lost:
            said = f" ({self.complaints[-1].strip()})" if self.complaints else ""
            self.lost = f"the connection ended with {code_name(code if code >= 0 else 128 - code)}{said}"
        return found + self._lines()

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

    def _answers(self, *, is_last: bool) -> list[str]:
        assert self.process.stdout is not None
        while data := self.process.stdout.read(LINES_BYTES):
            self._partial += data
        *rows, self._partial = self._partial.split(b"\n")
        rows += [self._partial] if is_last else []
        return [row.decode("utf-8", "replace") for row in rows]

    def _lines(self) -> list[Table]:
        """Return whole lines that the shown rank has written since the last call."""
        if self._shown is None:
            return []
        try:
            with open(self._shown, "rb") as file:
                file.seek(self._offset)
                data = file.read(LINES_BYTES)
        except FileNotFoundError:
            return []
        end = data.rfind(b"\n") + 1
        if (self.left and len(data) < LINES_BYTES) or (not end and len(data) == LINES_BYTES):
            end = len(data)  # the last line has no end, or is a long one
        self._offset += end
        return [{"lines": data[:end].decode("utf-8", "replace")}] if end else []


def shell_script(
    orders: Sequence[Mapping[str, Any]], folder: Path, token: str, grace_period_s: int, silence_s: int
) -> str:
    """Return what the shell of a node runs, as one compound command, which it reads whole before it begins."""
    commands = ""
    for order in orders:
        mark = f"{token}-{order['ranks'][0]}-"
        values = {
            "start": _start(order, mark),
            "log": shlex.quote(str(log_file(folder, order["ranks"][0]))),
            "mark": mark,
            "ranks": " ".join(map(str, order["ranks"])),
        }
        commands += _fill(COMMAND, values)
    values = {"token": TOKEN, "mark": token, "silence": f"-t {silence_s}" if silence_s else ""}
    return "{" + _fill(SHELL, {**values, "grace": str(grace_period_s), "commands": commands}) + "}\n"


def _start(order: Mapping[str, Any], mark: str) -> str:
    """Return the shell's words that replace it by a command."""
    words = [f"cd -- {shlex.quote(order['cwd'])} || exit"] if order["cwd"] else []
    words += [f'export {name}="${{{name}-{value}}}"' for name, value in order["defaults"].items()]
    words += [f"export {name}={shlex.quote(value)}" for name, value in {**order["env"], TOKEN: mark}.items()]
    if order["bin"]:  # commands of the interpreter's own environment (lt) before others
        words.append(f'export PATH={shlex.quote(order["bin"])}:"$PATH"')
    return "; ".join([*words, f"exec {shlex.join(order['argv'])}"])


def _fill(text: str, values: Mapping[str, str]) -> str:
    return re.sub("@([a-z]+)@", lambda found: values[found[1]], text)


def free_port() -> int:
    """Return a port of this machine that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
