"""Who failed first: every order in which agents can note what happened, without a process."""

from typing import Any

import pytest

from lt_launch.agent.policy import Place, write_table
from lt_launch.agent.verdict import again, describe, judge, report

SPEC: dict[str, Any] = {
    "completion": "exit",
    "procs_per_node": 2,
    "restart": {"max_restarts": 3, "max_without_progress": 2},
}
TRAINS = SPEC | {"completion": "run_dir", "run_dir": "run"}


def began(node: int, step: int = -1) -> dict[str, Any]:
    return {
        "time": 1.0,
        "event": "began",
        "node": node,
        "host": f"h{node}",
        "ranks": [2 * node, 2 * node + 1],
        "step": step,
    }


def ended(rank: int, code: int, time: float, *, told: bool = False) -> dict[str, Any]:
    node = rank // 2
    return {
        "time": time,
        "event": "ended",
        "node": node,
        "host": f"h{node}",
        "rank": rank,
        "code": code,
        "told": told,
        "tail": [f"rank {rank} said"],
    }


def left(node: int, code: int = 0, *, step: int = -1, completed: bool = False, asked: bool = False) -> dict[str, Any]:
    return {
        "time": 9.0,
        "event": "left",
        "node": node,
        "host": f"h{node}",
        "code": code,
        "step": step,
        "completed": completed,
        "asked": asked,
    }


def signalled(node: int) -> dict[str, Any]:
    return {"time": 2.0, "event": "signal", "node": node, "host": f"h{node}", "name": "SIGTERM"}


def test_all_zero_is_done() -> None:
    result = judge(SPEC, [[began(0), ended(0, 0, 2), ended(1, 0, 2), left(0)]])
    assert (result["kind"], result["code"], result["first"]) == ("done", 0, None)


def test_all_zero_is_not_done_where_rank_0_has_not_said_so() -> None:
    agents = [[began(0), ended(0, 0, 2), ended(1, 0, 2), left(0)]]
    result = judge(TRAINS, agents)
    assert (result["kind"], result["code"]) == ("failed", 70)
    assert "rank 0 has not noted" in result["reason"]
    agents[0][-1] = left(0, completed=True, step=7)
    assert judge(TRAINS, agents) == judge(TRAINS, agents) | {"kind": "done", "code": 0, "step": 7}


@pytest.mark.guarantee("first-failure")
def test_the_earliest_own_failure_is_named_and_not_its_victims() -> None:
    """Others leave with 75 because a peer is gone, abort, or are told to stop; some of it before the records arrive."""
    agents = [
        [began(0), ended(1, 75, 3.0), ended(0, -6, 3.5), left(0, 134)],
        [began(1), ended(3, 7, 2.9), ended(2, -15, 6.0, told=True), left(1, 7)],
    ]
    result = judge(SPEC, agents)
    assert (result["kind"], result["code"]) == ("failed", 7)
    assert describe(result["first"]) == "rank 3 on h1 was the first to fail: exit code 7"
    assert "    rank 3 said" in report(result).splitlines()


def test_a_75_that_came_earlier_is_still_only_a_consequence() -> None:
    agents = [[began(0), ended(1, 75, 2.0), ended(0, 9, 3.5), left(0, 9)]]
    assert judge(SPEC, agents)["first"]["rank"] == 0


def test_whoever_made_first_json_counts_before_the_clocks_of_different_nodes() -> None:
    agents = [[began(0), ended(1, 5, 1.0), left(0, 5)], [began(1), ended(2, 6, 2.0), left(1, 6)]]
    assert judge(SPEC, agents)["first"]["rank"] == 1
    assert judge(SPEC, agents, claim={"rank": 2, "node": 1})["first"]["rank"] == 2
    assert judge(SPEC, agents, claim={"rank": 0, "node": 0})["first"]["rank"] == 1  # a claim that no record bears out


def test_a_lost_node_is_the_cause_whatever_else_failed() -> None:
    agents = [[began(0), ended(0, 1, 2.0), left(0, 1)], [began(1)]]
    result = judge(SPEC, agents)
    assert (result["kind"], result["code"]) == ("lost", 75)
    assert describe(result["first"]).startswith("host h1 is lost (ranks 2 to 3): ")


def test_killed_by_a_signal_keeps_the_signal() -> None:
    result = judge(SPEC, [[began(0), ended(1, -9, 2.0), ended(0, 75, 2.1), left(0, 137)]])
    assert (result["kind"], result["code"]) == ("killed", 137)
    assert describe(result["first"]) == "rank 1 on h0 was the first to fail: killed by SIGKILL"


def test_75_by_itself_is_requeue_and_after_a_signal_stopped() -> None:
    both = [ended(0, 75, 3.0, told=True), ended(1, 75, 3.0, told=True)]
    stopped = judge(TRAINS, [[began(0), signalled(0), *both, left(0, 75, asked=True)]])
    assert (stopped["kind"], stopped["code"]) == ("stopped", 75)
    alone = judge(TRAINS, [[began(0), ended(0, 75, 3.0), ended(1, 75, 3.0), left(0, 75)]])
    assert (alone["kind"], alone["code"]) == ("requeue", 75)


@pytest.mark.parametrize("code", [-10, 138, -15, 143, 75])
def test_what_dies_of_a_stop_before_its_agent_hears_of_it_was_stopped(code: int) -> None:
    """Slurm tells all processes of a step at once."""
    ends = [ended(0, code, 3.0), ended(1, code, 3.0), left(0, code)]
    for agents, asked in (([[began(0), *ends]], True), ([[began(0), ends[0], signalled(0), *ends[1:]]], False)):
        result = judge(SPEC, agents, claim={"rank": 0, "node": 0}, spawner_code=138, asked=asked)
        assert (result["kind"], result["code"]) == ("stopped", 75)
    assert judge(SPEC, [[began(0), *ends]])["kind"] != "stopped"


@pytest.mark.parametrize("code", [7, -9, -11])
def test_what_fails_by_itself_failed_also_where_a_stop_came(code: int) -> None:
    result = judge(SPEC, [[began(0), ended(0, -10, 3.0), ended(1, code, 3.1), left(0, 138)]], asked=True)
    assert (result["kind"], result["first"]["rank"]) == ("failed" if code > 0 else "killed", 1)


def test_a_mistake_while_stopping_is_a_failure_of_a_job_that_trains() -> None:
    agents = [
        [began(0), signalled(0), ended(0, 70, 3.0, told=True), ended(1, 75, 3.0, told=True), left(0, 75, asked=True)]
    ]
    assert (judge(TRAINS, agents)["kind"], judge(TRAINS, agents)["code"]) == ("failed", 70)
    assert judge(SPEC, agents)["kind"] == "stopped"


def test_a_stop_that_had_to_be_forced_says_so() -> None:
    killed = {"time": 5.0, "event": "killed", "node": 0, "host": "h0", "ranks": [1]}
    agents = [[began(0), signalled(0), ended(0, 75, 3.0, told=True), killed, ended(1, -9, 5.0, told=True), left(0, 75)]]
    result = judge(TRAINS, agents)
    assert (result["kind"], result["code"]) == ("stopped", 75)
    assert "had to be killed" in result["reason"]


def test_what_started_the_processes_counts_where_no_process_failed() -> None:
    agents = [[began(0), ended(0, 0, 2.0), ended(1, 0, 2.0), left(0, completed=True)]]
    assert judge(TRAINS, agents, spawner_code=1)["code"] == 1
    assert judge(TRAINS, agents, spawner_code=0)["kind"] == "done"


def test_a_launcher_that_was_gone() -> None:
    lost = {"time": 2.0, "event": "lost", "node": 0, "host": "h0", "reason": "x"}
    result = judge(TRAINS, [[began(0), lost, ended(0, -15, 3.0, told=True), ended(1, -15, 3.0, told=True), left(0)]])
    assert (result["kind"], result["code"]) == ("lost", 75)


@pytest.mark.parametrize(
    ("kind", "yes"),
    [("requeue", True), ("lost", True), ("killed", True), ("failed", False), ("stopped", False), ("done", False)],
)
def test_only_losses_and_75_are_started_again(tmp_path, kind: str, yes: bool) -> None:
    place = Place(tmp_path / "a" / "spec.json")
    place.new_attempt()
    assert again(SPEC, place, {"kind": kind})[0] is yes


def attempts(tmp_path, steps: list[tuple[int, int]]) -> Place:
    place = Place(tmp_path / "a" / "spec.json")
    for before, after in steps:
        write_table(
            place.attempt(place.new_attempt()) / "exit.json", {"kind": "killed", "step_before": before, "step": after}
        )
    return place


@pytest.mark.guarantee("restart-progress")
@pytest.mark.parametrize(
    ("steps", "yes"),
    [
        ([(-1, -1)], True),
        ([(-1, -1), (-1, -1)], False),
        ([(-1, 5), (5, 5)], True),
        ([(-1, 5), (5, 5), (5, 5)], False),
        ([(-1, -1), (-1, 3), (3, 3)], True),
        ([(0, 1), (1, 2), (2, 3)], True),
        ([(0, 1), (1, 2), (2, 3), (3, 4)], False),  # three restarts are all there are
    ],
)
def test_restarts_are_bounded_and_need_progress(tmp_path, steps: list[tuple[int, int]], yes: bool) -> None:
    assert again(TRAINS, attempts(tmp_path, steps), {"kind": "killed"})[0] is yes


def test_jobs_without_checkpoints_are_only_counted(tmp_path) -> None:
    place = attempts(tmp_path, [(-1, -1)] * 3)
    assert again(SPEC, place, {"kind": "killed"}) == (True, "restart 3 of at most 3")
    place.new_attempt()
    assert again(SPEC, place, {"kind": "killed"}) == (False, "3 of 3 restarts are used up")
