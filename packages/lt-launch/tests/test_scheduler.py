"""Who gets which hosts, and when: the rules alone, without a process."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from lt_launch.errors import LaunchError
from lt_launch.hosts import Host
from lt_launch.job import Job, Pipeline, Resources, Stage
from lt_launch.scheduler import HostScheduler, ResourceRequest, resource_request
from lt_launch.stage_runner import has_parallel_stages


def hosts(*names: str, slots: int = 0) -> tuple[Host, ...]:
    return tuple(Host(name=name, slots=slots) for name in names)


def room(*names: str, slots: int = 0, memory_gib: float = float("inf")) -> HostScheduler:
    return HostScheduler(hosts(*names, slots=slots), lambda host: host.slots or 1, memory_gib)


@pytest.fixture
def held() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def take(made: HostScheduler, held: ExitStack, turn: int, **need: Any) -> list[str]:
    """Take now or not at all."""
    found = held.enter_context(made.acquire((turn, 0), ResourceRequest(**need), lambda: True))
    return [host.name for host in found]


def test_hosts_are_taken_in_the_order_of_the_allocation_and_given_back(held: ExitStack) -> None:
    made = room("c", "a", "b")
    with made.acquire((0, 0), ResourceRequest(nodes=2), lambda: True) as first:
        assert [host.name for host in first] == ["c", "a"]
        assert take(made, held, 1) == ["b"]
        assert take(made, held, 2) == []
    assert take(made, held, 3, nodes=2) == ["c", "a"]


def test_places_are_shared_and_never_given_twice(held: ExitStack) -> None:
    made = room("a", slots=8)
    assert take(made, held, 0, slots=5) == ["a"]
    assert take(made, held, 1, slots=4) == []
    assert take(made, held, 2, slots=3) == ["a"]
    assert take(made, held, 3, slots=1) == []


def test_what_needs_more_than_there_is_has_the_host_for_itself(held: ExitStack) -> None:
    made = room("a", slots=2)
    with made.acquire((0, 0), ResourceRequest(slots=99), lambda: True) as found:
        assert found
        assert take(made, held, 1) == []
    assert take(made, held, 1) == ["a"]
    assert take(made, held, 2, slots=99) == []


def test_devices_memory_and_whole_hosts(held: ExitStack) -> None:
    made = room("a", "b", slots=8, memory_gib=64)
    assert take(made, held, 0, devices=True) == ["a"]
    assert take(made, held, 1, devices=True) == ["b"]
    assert take(made, held, 2, devices=True) == []
    assert take(made, held, 3, memory_gib=40) == ["a"]
    assert take(made, held, 4, memory_gib=30, nodes=2) == []
    assert take(made, held, 5, memory_gib=24) == ["a"]
    assert take(made, held, 6, exclusive=True) == []
    made = room("a", "b", slots=8)
    assert take(made, held, 0, exclusive=True) == ["a"]
    assert take(made, held, 1) == ["b"]
    assert take(made, held, 2, nodes=2) == []
    assert take(made, held, 3, exclusive=True) == []


def test_lost_hosts_are_used_only_where_too_few_are_left(held: ExitStack) -> None:
    made = room("a", "b", "c")
    made.lost_hosts.add("a")
    with made.acquire((0, 0), ResourceRequest(nodes=2), lambda: True) as found:
        assert [host.name for host in found] == ["b", "c"]
    assert take(made, held, 1, nodes=3) == ["a", "b", "c"]


def test_elements_of_an_array_go_round_the_hosts() -> None:
    made = room("a", "b")
    found = []
    for index in range(4):
        with made.acquire((0, index), ResourceRequest(array_index=index), lambda: True) as got:
            found += [host.name for host in got]
    assert found == ["a", "b", "a", "b"]


def test_a_wide_stage_is_not_kept_out_by_small_ones_that_come_later(held: ExitStack) -> None:
    """The wide one waits for both hosts; one is free, and a stage that stands behind it in the file must leave it."""
    made = room("a", "b")
    small = ExitStack()
    assert take(made, small, 0) == ["a"]
    began, got = threading.Event(), []

    def wide() -> None:
        with made.acquire((1, 0), ResourceRequest(nodes=2), began.is_set) as found:
            got.append([host.name for host in found])

    thread = threading.Thread(target=wide)
    thread.start()
    while not made._queue:
        pass
    assert take(made, held, 2) == [], "b is kept for the wide one"
    assert take(made, held, 0) == ["b"], "what stands before it in the file does not wait for it"
    held.close()
    small.close()
    thread.join(60)
    assert got == [["a", "b"]]


def test_hosts_with_too_few_slots_are_not_used_and_too_few_hosts_are_refused(held: ExitStack) -> None:
    made = HostScheduler((Host(name="a", slots=2), Host(name="b", slots=8)), lambda host: host.slots)
    assert take(made, held, 0, procs_per_node=4, slots=4) == ["b"]
    made.check_feasible("x", ResourceRequest(nodes=2, procs_per_node=2))
    with pytest.raises(LaunchError, match="stage x needs 2 hosts with 4 slots and there are 1; lower nodes or add"):
        made.check_feasible("x", ResourceRequest(nodes=2, procs_per_node=4))
    with pytest.raises(LaunchError, match="stage x needs 3 hosts and there are 2"):
        made.check_feasible("x", ResourceRequest(nodes=3, procs_per_node=2))


def test_what_a_job_takes() -> None:
    plain = Job(name="x", argv=("x",), procs_per_node=2)
    assert resource_request(plain, 3) == ResourceRequest(procs_per_node=2, slots=2, array_index=3)
    resources = Resources(cpus_per_proc=4, memory_gib=5, gpus_per_node=1, exclusive=True)
    wanted = ResourceRequest(nodes=2, procs_per_node=2, slots=8, memory_gib=5, devices=True, exclusive=True)
    assert resource_request(Job(name="x", argv=("x",), nodes=2, procs_per_node=2, resources=resources)) == wanted
    assert resource_request(Job(name="x", argv=("x",), completion="run_dir", run_dir="r")).devices
    assert resource_request(Job(name="x", argv=("x",), resources=Resources(neuron_cores_per_node=2))).devices


@pytest.mark.parametrize(
    ("after", "wanted"),
    [([(), (0,), (1,)], False), ([(), (0,), (0,)], True), ([(), ()], True), ([(), (0,), (0, 1)], False), ([()], False)],
)
def test_whether_stages_may_run_side_by_side(after: list[tuple[int, ...]], wanted: bool) -> None:
    stages = tuple(
        Stage(job=Job(name=f"s{at}", argv=("x",)), after=tuple(f"s{one}" for one in before))
        for at, before in enumerate(after)
    )
    assert has_parallel_stages(Pipeline(name="p", stages=stages)) is wanted
