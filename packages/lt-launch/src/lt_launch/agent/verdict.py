"""How an attempt ended, from what its agents noted; pure but for reading and writing the records.

The first failure, in this order: an agent that never said how it ended (its node or its link was lost: whatever else
failed, failed for want of it), then the earliest process that ended by itself with a code that is neither 0 nor 75,
then the earliest that left with 75 unasked. Among processes of one node the agent's own order counts; between nodes the
file `first.json`, which only one of them could make, and where there is none the order of their clocks.

    done        every process ended with 0, and where the job trains rank 0 noted that all steps are done
    stopped     ended early because it was told to, and saved: 75
    requeue     ended early by itself, with 75
    lost        an agent is gone
    killed      a process was ended by a signal that was not ours
    failed      anything else
"""

from __future__ import annotations

import signal
from typing import Any

from .policy import Place, Table, read_table, records, write_table

REQUEUE, OURS = 75, 70
DONE, STOPPED, REQUEUED, LOST, KILLED, FAILED = "done", "stopped", "requeue", "lost", "killed", "failed"
INTERRUPTED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
"""How a program that stops at once may end."""
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
BY_A_STOP = tuple(sign for number in STOPS for sign in (-int(number), 128 + int(number)))
"""How a process ends that dies of a stop signal, alone or as the last of a shell."""
AGAIN = (REQUEUED, LOST, KILLED)
"""Endings after which another attempt may help."""


def judge(
    spec: Table, agents: list[list[Table]], *, claim: Table | None = None, spawner_code: int = 0, asked: bool = False
) -> Table:
    """The exit record of an attempt.

    Args:
        spec: what was run.
        agents: the records of each agent.
        claim: what stands in first.json.
        spawner_code: what started the agents ended with (srun, ssh); counts where agents know of nothing.
        asked: whether it was told to stop by somebody who tells the processes as well as their agents (Slurm): a
            process may then have ended before its agent knew why.
    """
    asked = asked or any(record["event"] == "signal" for agent in agents for record in agent)
    first = _first_failure(spec, agents, claim, asked)
    alone = any(record["event"] == "lost" for agent in agents for record in agent)
    left = [record for agent in agents for record in agent if record["event"] == "left"]
    steps = [record["step"] for record in left if record["node"] == 0]
    began = [record for agent in agents for record in agent if record["event"] == "began" and record["node"] == 0]
    step = max(steps, default=-1)
    result: Table = {
        "kind": DONE,
        "code": 0,
        "reason": "",
        "first": first,
        "step_before": max((record["step"] for record in began), default=-1),
        "step": step,
    }
    if first is not None:
        result["kind"], result["code"] = _ending(first, asked)
        result["reason"] = describe(first)
    elif alone:
        result["kind"], result["code"], result["reason"] = LOST, REQUEUE, "whoever started it was gone"
    elif asked and (not agents or any(record["code"] != 0 for record in left)):
        killed = any(record["event"] == "killed" for agent in agents for record in agent)
        late = ", but had to be killed when the grace time was over" if killed else ""
        result["kind"], result["code"], result["reason"] = STOPPED, REQUEUE, f"stopped as it was told{late}"
    elif spawner_code:
        result["kind"], result["code"] = (REQUEUED if spawner_code == REQUEUE else FAILED), spawner_code
        result["reason"] = f"what started the processes ended with {spawner_code}, and no process failed"
    elif not agents:
        result["kind"], result["code"], result["reason"] = LOST, REQUEUE, "no agent has begun"
    elif spec.get("completion") == "run_dir" and not any(record.get("completed") for record in left):
        result["kind"], result["code"] = FAILED, OURS
        result["reason"] = (
            f"every process ended with 0, but rank 0 has not noted in {spec.get('run_dir')}/events.jsonl that all "
            "steps are done"
        )
    return result


def _ending(first: Table, asked: bool) -> tuple[str, int]:
    code = first["code"]
    if code is None:
        return LOST, REQUEUE
    if code == REQUEUE:
        return (STOPPED if asked else REQUEUED), REQUEUE
    return (KILLED, 128 - code) if code < 0 else (FAILED, code)


def _first_failure(spec: Table, agents: list[list[Table]], claim: Table | None, asked: bool) -> Table | None:
    lost = _lost(spec, agents)
    if lost:
        return lost
    ended = [record for agent in agents for record in agent if record["event"] == "ended"]
    own = [record for record in ended if not record["told"] and record["code"] not in (0, REQUEUE)]
    if asked:
        own = [record for record in own if record["code"] not in BY_A_STOP]
    if own:
        claimed = [r for r in own if claim and (r["rank"], r["node"]) == (claim.get("rank"), claim.get("node"))]
        return _failure(claimed[0] if claimed else min(own, key=_when))
    requeue = [record for record in ended if record["code"] == REQUEUE and not record["told"]]
    if requeue:
        return _failure(min(requeue, key=_when))
    late = [record for record in ended if record["told"] and record["code"] not in (0, REQUEUE)]
    if asked or any(record["event"] == "lost" for agent in agents for record in agent):
        trains = spec.get("completion") == "run_dir"  # such a process answers a stop with 75 and with nothing else
        late = [record for record in late if trains and record["code"] > 0 and record["code"] not in INTERRUPTED]
    return _failure(min(late, key=_when)) if late else None


def _lost(spec: Table, agents: list[list[Table]]) -> Table | None:
    """A node that is gone: told by whoever watched it, or an agent that began and never left."""
    for agent in agents:
        gone = [record for record in agent if record["event"] == "gone"]
        left = any(record["event"] == "left" for record in agent)
        if gone or not left:
            record = gone[0] if gone else agent[-1] if agent else {"node": "?", "host": "?", "time": 0.0}
            ranks = next((r["ranks"] for r in agent if r["event"] == "began"), record.get("ranks", []))
            tail = [record["reason"]] if gone else ["its agent is gone without a word: the node was lost, or killed it"]
            return {
                "rank": ranks[0] if ranks else None,
                "ranks": ranks,
                "code": None,
                "host": record["host"],
                "node": record["node"],
                "tail": tail,
            }
    return None


def _when(record: Table) -> tuple[float, int]:
    return record["time"], record["rank"]


def _failure(record: Table) -> Table:
    return {name: record[name] for name in ("rank", "code", "host", "node", "tail")}


def code_name(code: int) -> str:
    """An exit code for people.

    Example:
        >>> code_name(7), code_name(-9)
        ('exit code 7', 'killed by SIGKILL')
    """
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def describe(first: Table) -> str:
    """One sentence about a first failure."""
    if first["code"] is None:
        ranks = first.get("ranks") or []
        which = f"ranks {ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}" if ranks else "its ranks"
        return f"host {first['host']} is lost ({which}): {first['tail'][0]}"
    return f"rank {first['rank']} on {first['host']} was the first to fail: {code_name(first['code'])}"


def report(result: Table) -> str:
    """The ending of an attempt in some lines, with the last lines of the first failure."""
    first = result.get("first")
    lines = [f"{result['kind']}: {result['reason']}" if result["reason"] else result["kind"]]
    if first and first["code"] is not None and first["tail"]:
        lines += [f"the last lines of rank {first['rank']}:", *(f"    {line}" for line in first["tail"][-12:])]
    return "\n".join(lines)


def conclude(spec: Table, place: Place, number: int, spawner_code: int = 0, *, asked: bool = False) -> Table:
    """Judge an attempt by the records in its folder, and write exit.json.

    Args:
        spec: what was run.
        place: of the stage.
        number: of the attempt.
        spawner_code: see `judge`.
        asked: see `judge`.
    """
    attempt = place.attempt(number)
    agents = records(attempt)
    result = judge(spec, agents, claim=read_table(attempt / "first.json"), spawner_code=spawner_code, asked=asked)
    return keep(place, number, result)


def keep(place: Place, number: int, result: Table) -> Table:
    """Write the exit record of an attempt."""
    write_table(place.attempt(number) / "exit.json", result)
    return result


def again(spec: Table, place: Place, result: Table) -> tuple[bool, str]:
    """Whether to start another attempt after `result`, and why or why not."""
    policy: Any = spec.get("restart") or {}
    if result["kind"] not in AGAIN:
        return False, f"an attempt that ended as {result['kind']} is not started again"
    attempts = place.attempts_of_launch()
    restarts, most = len(attempts) - 1, int(policy.get("max_restarts", 0))
    if restarts >= most:
        return False, f"{restarts} of {most} restarts are used up"
    if spec.get("completion") == "run_dir":
        still = 0
        for number in reversed(attempts):
            ended = read_table(place.attempt(number) / "exit.json") or {}
            if int(ended.get("step", -1)) > int(ended.get("step_before", -1)):
                break
            still += 1
        limit = int(policy.get("max_without_progress", 1))
        if still >= limit:
            return (
                False,
                f"{still} attempt(s) in a row made no new checkpoint; look at the failure before starting again",
            )
    return True, f"restart {restarts + 1} of at most {most}"
