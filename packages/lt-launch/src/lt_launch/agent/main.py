"""The command line of the agent; what each command does stands in the package's docstring."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from . import policy, verdict
from .command import Start
from .guard import guarded
from .node import Node
from .outbox import Outbox
from .policy import Place, Table, read_table

USER_ERROR = 64


def main(arguments: Sequence[str]) -> int:
    """Run one command; its exit code."""
    given = _parser().parse_args(list(arguments))
    spec = read_table(Path(given.spec))
    if spec is None:
        sys.stderr.write(f"lt-launch: {given.spec} is missing or damaged; start the launch again\n")
        return USER_ERROR
    place = Place(Path(given.spec), given.index)
    if given.command == "open":
        return open_attempt(spec, place)
    if given.command == "verdict":
        return conclude(spec, place, given.attempt, given.code)
    if given.command == "again":
        ended = read_table(place.attempt(given.attempt) / "exit.json")
        yes, why = verdict.again(spec, place, ended) if ended else (False, "the attempt has no exit.json")
        sys.stdout.write(f"{why}\n")
        return 0 if yes else 1
    start = _start(given, spec)

    def run() -> int:
        outbox = Outbox()
        node = Node(spec, place, start, given.attempt, outbox, 0 if given.control else None)
        try:
            return node.run()
        finally:
            outbox.close(0.0 if node.alone else 5.0)

    return run() if given.control else guarded(run, place.attempt(given.attempt), start.node)


def open_attempt(spec: Table, place: Place) -> int:
    """Print "skip", or the number of a new attempt; the key of what it will read is kept in its folder."""
    if policy.done(spec, place):
        sys.stdout.write("skip\n")
        return 0
    number = place.new_attempt()
    (place.attempt(number) / "key").write_text(policy.key(spec, place), encoding="ascii")
    sys.stdout.write(f"{number}\n")
    return 0


def conclude(spec: Table, place: Place, number: int, spawner_code: int) -> int:
    """Judge an attempt, tell it on standard error, leave the stamp; the exit code of the stage."""
    result = finish(spec, place, number, verdict.conclude(spec, place, number, spawner_code))
    sys.stderr.write("".join(f"lt-launch: {line}\n" for line in verdict.report(result).splitlines()))
    return int(result["code"])


def finish(spec: Table, place: Place, number: int, result: Table) -> Table:
    """Stamp a stage whose attempt succeeded; the exit record, changed where an output is missing."""
    if result["kind"] != verdict.DONE:
        return result
    key = place.attempt(number) / "key"
    missing = policy.mark(spec, place, key.read_text(encoding="ascii") if key.exists() else None)
    if missing:
        result = {**result, "kind": verdict.FAILED, "code": verdict.OURS, "reason": missing}
        verdict.keep(place, number, result)
    return result


def _start(given: argparse.Namespace, spec: Table) -> Start:
    return Start(
        node=given.node_rank,
        nodes=int(spec["nodes"]),
        procs=int(spec["procs_per_node"]),
        master_addr=given.master_addr,
        master_port=given.master_port,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lt-launch agent")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("open", "node", "verdict", "again"):
        one = commands.add_parser(name)
        one.add_argument("spec")
        one.add_argument("--index", type=int)
        if name != "open":
            one.add_argument("--attempt", type=int, required=True)
        if name == "node":
            one.add_argument("--master-addr", required=True)
            one.add_argument("--master-port", type=int, required=True)
            one.add_argument("--control", action="store_true")
            one.add_argument("--node-rank", type=int, required=True)
        if name == "verdict":
            one.add_argument("--code", type=int, default=0)
    return parser
