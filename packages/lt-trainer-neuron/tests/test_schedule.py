"""The order of passes and transfers over stages, for every number of stages to 8 and of micro-batches to 16.

Stages are played against each other: a transfer happens when both of its stages have come to it, and blocks them until
then, as the collectives of the device do.
"""

from collections.abc import Callable, Iterator
from itertools import accumulate, product

import pytest

from lt_trainer_neuron.pipeline_schedule import PEER_ACTIONS, PipelineAction, forward_only, one_forward_one_backward

SIZES = list(product(range(1, 9), range(1, 17)))
Schedule = Callable[[int, int, int], Iterator[PipelineAction]]


class MismatchError(Exception):
    """Two neighbors are at a transfer, and mean different ones: a device would take the wrong tensor, or hang."""


def played(schedule: Schedule, n_stages: int, n_micro: int) -> list[list[PipelineAction]]:
    """What every stage has done when nothing can go on any more; transfers block."""
    wanted = [list(schedule(stage, n_stages, n_micro)) for stage in range(n_stages)]
    done: list[list[PipelineAction]] = [[] for _ in wanted]
    moved = True
    while moved:
        moved = False
        for stage, turns in enumerate(wanted):
            while len(done[stage]) < len(turns):
                kind, index = turns[len(done[stage])]
                if kind in PEER_ACTIONS:
                    answer, step = PEER_ACTIONS[kind]
                    other = stage + step
                    if len(done[other]) == len(wanted[other]):
                        break
                    theirs = wanted[other][len(done[other])]
                    if theirs[0] not in PEER_ACTIONS or other + PEER_ACTIONS[theirs[0]][1] != stage:
                        break  # it is busy, or waits for its other neighbor
                    if theirs != (answer, index):
                        raise MismatchError(f"stage {stage}: {kind} {index}; stage {other}: {theirs}")
                    done[other].append(theirs)
                done[stage].append((kind, index))
                moved = True
    return done


def assert_played_to_the_end(schedule: Schedule, n_stages: int, n_micro: int) -> list[list[PipelineAction]]:
    done = played(schedule, n_stages, n_micro)
    for stage, turns in enumerate(done):
        assert turns == list(schedule(stage, n_stages, n_micro)), f"stage {stage} of {n_stages} stands at {turns[-1:]}"
    return done


@pytest.mark.parametrize("n_stages", range(1, 9))
def test_training_comes_to_its_end_where_transfers_block(n_stages: int) -> None:
    for n_micro in range(1, 17):
        for stage, turns in enumerate(assert_played_to_the_end(one_forward_one_backward, n_stages, n_micro)):
            place, all_micros = {turn: at for at, turn in enumerate(turns)}, list(range(n_micro))
            assert len(place) == len(turns), "a turn comes twice"
            kinds = {kind: [index for this, index in turns if this == kind] for kind, _ in turns}
            assert kinds.pop("forward") == kinds.pop("backward") == all_micros
            expected = {"recv_forward", "send_backward"} if stage > 0 else set()
            expected |= {"send_forward", "recv_backward"} if stage < n_stages - 1 else set()
            assert kinds == dict.fromkeys(expected, all_micros)
            for index in all_micros:
                chain = ["recv_forward", "forward", "send_forward", "recv_backward", "backward", "send_backward"]
                order = [place[kind, index] for kind in chain if (kind, index) in place]  # pyright: ignore[reportArgumentType]
                assert order == sorted(order)
            held = list(accumulate((kind == "forward") - (kind == "backward") for kind, _ in turns))
            assert max(held) == min(n_stages - stage, n_micro)
            if stage == n_stages - 1:  # its forward and backward are one graph, and nothing of it is held
                assert all(turns[place["forward", index] + 1] == ("backward", index) for index in all_micros)


def test_evaluation_comes_to_its_end_where_transfers_block() -> None:
    for n_stages, n_micro in SIZES:
        for stage, turns in enumerate(assert_played_to_the_end(forward_only, n_stages, n_micro)):
            assert [index for kind, index in turns if kind == "forward"] == list(range(n_micro))
            assert len(turns) == n_micro * (1 + (stage > 0) + (stage < n_stages - 1))
