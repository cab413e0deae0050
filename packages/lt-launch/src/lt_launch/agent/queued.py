"""What a job in a queue asks before and after its processes: `python3 <out>/launch/agent/queued.py enter|leave SPEC`.

A queue starts a job again by itself (a node was lost, another job was more urgent), and the job can ask for it. Either
is only wise while training goes forward, so the job's script asks here:

    enter SPEC [--index I] [--restarts N]
        prints "skip" (done already), "stop" (starting again would not help) or the number of a new attempt. An attempt
        before this one that nobody concluded is concluded first: the queue took its nodes away.
    leave SPEC --attempt A [--index I] [--code N] [--told SIGNAL]
        prints "ACTION CODE LOST": requeue or end; the exit code of the stage; numbers of nodes that were lost while
        others were not, or "-". SIGNAL is what the queue itself sent, if anything.
    avoid SPEC --bad FILE [--never NODE,...]
        prints which of the lost nodes in FILE (one a line, newest last) to leave out, or "-"; standard input has a node
        of the partition and its state on each line, as sinfo -N -o "%N %t" prints them.

An attempt that the queue cut short counts neither as a failure nor against `max_restarts`. Attempts in a row without a
new checkpoint do count: `max_without_progress` of those that failed, `max_restarts` of all. What happened before a
person launched the stage again does not count.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: make its folder a package of its own name
    _folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[0] = os.path.dirname(_folder)
    __package__ = os.path.basename(_folder)
    __import__(__package__)

import importlib

main_module = importlib.import_module(".main", __package__)
places = importlib.import_module(".places", __package__)
stamp = importlib.import_module(".stamp", __package__)
verdict = importlib.import_module(".verdict", __package__)

Table = dict[str, Any]
CANCELLED = "cancelled"
"""A file of this name beside the spec: a person has cancelled the stage."""
INTERRUPTED = "interrupted"
EXIT_USER = 64
UNUSABLE = ("down", "drain", "drng", "fail", "maint", "unk", "err", "inval", "futr", "npc", "boot", "pow")
"""How sinfo's short states begin of nodes that no job gets."""


def main(arguments: Sequence[str]) -> int:
    """Run one command; its exit code."""
    given = _parser().parse_args(list(arguments))
    spec = places.read_table(Path(given.spec))
    if spec is None:
        sys.stderr.write(f"lt-launch: {given.spec} is missing or damaged; start the launch again\n")
        return EXIT_USER
    place = places.Place(Path(given.spec), given.index)
    if given.command == "enter":
        return enter(spec, place, given.restarts)
    if given.command == "avoid":
        bad = Path(given.bad).read_text(encoding="utf-8").split()
        out = avoid(int(spec["nodes"]), bad, sys.stdin.read().splitlines(), given.never.split(","))
        sys.stdout.write(f"{','.join(out) or '-'}\n")
        return 0
    return leave(spec, place, given.attempt, given.code, given.told)


def enter(spec: Table, place: Any, restarts: int) -> int:
    """Print what the script is to do; `restarts` is how often the queue has started this job again."""
    attempts = place.attempts()
    if attempts and not (place.attempt(attempts[-1]) / "exit.json").exists():
        result = verdict.conclude(spec, place, attempts[-1], 0, shared=True)
        if main_module.finish(spec, place, attempts[-1], result)["kind"] != verdict.DONE:
            verdict.keep(place, attempts[-1], {**result, INTERRUPTED: True})
    if stamp.done(spec, place):
        sys.stdout.write("skip\n")
        return 0
    if restarts and attempts:
        if (place.stage / CANCELLED).exists():
            yes, why = False, "it was cancelled"
        else:
            yes, why = wise(spec, place)
        sys.stderr.write(f"lt-launch: {why}\n")
        if not yes:
            sys.stdout.write("stop\n")
            return 0
    number = place.new_attempt(launched=not restarts)
    (place.attempt(number) / "key").write_text(stamp.key(spec, place), encoding="ascii")
    sys.stdout.write(f"{number}\n")
    return 0


def leave(spec: Table, place: Any, number: int, code: int, told: str) -> int:
    """Conclude an attempt, and print what the script is to do."""
    newest = max([number, *place.attempts()])  # a step that the queue started again made attempts of its own
    result = verdict.conclude(spec, place, newest, code, asked=bool(told), shared=True)
    result = main_module.finish(spec, place, newest, result)
    if told:
        verdict.keep(place, newest, {**result, INTERRUPTED: True})
    sys.stderr.write("".join(f"lt-launch: {line}\n" for line in verdict.report(result).splitlines()))
    lost = "-"
    if result["kind"] == verdict.DONE or (place.stage / CANCELLED).exists():
        action = "end"
    else:
        yes, why = wise(spec, place)
        sys.stderr.write(f"lt-launch: {why}\n")
        action = "requeue" if yes else "end"
        if not told and (spec.get("restart") or {}).get("exclude_bad_nodes"):
            lost = ",".join(map(str, lost_nodes(spec, place, newest))) or "-"
    sys.stdout.write(f"{action} {int(result['code'])} {lost}\n")
    return 0


def wise(spec: Table, place: Any) -> tuple[bool, str]:
    """Whether another attempt may help after the newest one, and why or why not."""
    policy = spec.get("restart") or {}
    most, patience = int(policy.get("max_restarts", 0)), int(policy.get("max_without_progress", 1))
    numbers = place.attempts_of_launch()
    ended = [places.read_table(place.attempt(number) / "exit.json") or {} for number in numbers]
    cut_short = [  # by the queue, or by a signal that it was told to send
        one.get("kind") == verdict.STOPPED or (bool(one.get(INTERRUPTED)) and one.get("kind") in verdict.AGAIN)
        for one in ended
    ]
    if not cut_short[-1] and ended[-1].get("kind") not in verdict.AGAIN:
        return False, f"an attempt that ended as {ended[-1].get('kind', 'unknown')} is not started again"
    failures = cut_short.count(False)
    if failures > most:
        return False, f"{most} of {most} restarts are used up"
    if spec.get("completion") == "run_dir":
        still = [(one, short) for one, short in zip(ended, cut_short, strict=True)]
        streak: list[bool] = []
        for one, short in reversed(still):
            if int(one.get("step", -1)) > int(one.get("step_before", -1)):
                break
            streak.append(short)
        if streak.count(False) >= patience or len(streak) > max(most, patience):
            return False, f"{len(streak)} attempt(s) in a row made no new checkpoint; look at the failure first"
    what = "cut short by the queue" if cut_short[-1] else f"ended as {ended[-1]['kind']}"
    return True, f"attempt {numbers[-1]} was {what}; {failures} of {most} restarts are used"


def lost_nodes(spec: Table, place: Any, number: int) -> list[int]:
    """Nodes whose agents never said how they ended while those of others did; none when all or none are lost."""
    left = {
        record["node"]
        for agent in places.records(place.attempt(number))
        for record in agent
        if record["event"] == "left"
    }
    lost = [node for node in range(int(spec["nodes"])) if node not in left]
    return lost if left else []


def avoid(needed: int, bad: Sequence[str], partition: Iterable[str], never: Sequence[str]) -> list[str]:
    """Lost nodes to leave out, the newest first, while enough others can be had.

    A job that no node is left for would wait for ever.

    Args:
        needed: nodes of the job.
        bad: lost nodes in the order in which they were lost.
        partition: a node and its state on each line.
        never: nodes that the profile leaves out already.
    """
    rows = [line.split() for line in partition if line.strip()]
    usable = {row[0] for row in rows if not row[-1].startswith(UNUSABLE) and not row[-1].endswith("*")} - set(never)
    found: list[str] = []
    for name in dict.fromkeys(reversed(bad)):
        if len(usable - {*found, name}) >= needed:
            found.append(name)
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lt-launch agent, in a queue")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("enter", "leave", "avoid"):
        one = commands.add_parser(name)
        one.add_argument("spec")
        one.add_argument("--index", type=int)
        if name == "enter":
            one.add_argument("--restarts", type=int, default=0)
        elif name == "avoid":
            one.add_argument("--bad", required=True)
            one.add_argument("--never", default="")
        else:
            one.add_argument("--attempt", type=int, required=True)
            one.add_argument("--code", type=int, default=0)
            one.add_argument("--told", default="")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
