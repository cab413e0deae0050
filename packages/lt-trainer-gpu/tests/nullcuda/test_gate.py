"""The engine with `device = "cuda"` on the null device: what a step asks of a GPU, in several layouts.

Three steps of a little model in each layout. A step waits for nothing and copies nothing to the host; fetching its
metrics does so once. Matrix products are in bfloat16. Collectives, with the products between them, are those stored in
`schedules/`, and kernels are at most a few percent more; after a deliberate change

    LT_RECORD=1 pytest packages/lt-trainer-gpu/tests/nullcuda/test_gate.py

writes both anew, and the diff shows what has changed. They are torch's doing as well, so they hold for the version that
they name. That the checks notice faults is tested at the end.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from null_device.ranks import Job
from null_device.trace import Part

SCHEDULES = Path(__file__).resolve().parent / "schedules"
TORCH = ".".join(torch.__version__.split(".")[:2])
HEADROOM = 1.03
"""Kernels above the stored number that are no failure."""

MODEL = {"hidden_size": 256, "intermediate_size": 512, "n_heads": 4, "n_kv_heads": 2, "n_layers": 3}
UNTIED = (*MODEL.items(), ("tie_word_embeddings", False))
TIED = (*MODEL.items(), ("tie_word_embeddings", True))
TP, SP, HSDP = "parallel.tp=2", "parallel.sequence_parallel=true", "parallel.dp_replicate=2"
FULL = "engine.gpu.activation_checkpointing=full"

LAYOUTS = {
    "one": Job(model=UNTIED, micro_batch_size=4),
    "accumulation": Job(model=UNTIED),
    "recompute-full": Job(model=UNTIED, micro_batch_size=4, overrides=(FULL,)),
    "fsdp": Job(model=UNTIED, ranks=2),
    "fsdp-tied": Job(model=TIED, ranks=2, micro_batch_size=2),
    "hsdp": Job(model=UNTIED, ranks=4, overrides=(HSDP,)),
    "tp-sp": Job(model=UNTIED, ranks=2, micro_batch_size=4, overrides=(TP, SP)),
    "fsdp-tp": Job(model=UNTIED, ranks=4, micro_batch_size=2, overrides=(TP, SP)),
}

Steps = list[list[Part]]
"""By rank, the second and the third step; the first also sets FSDP up."""


def check_waits(steps: Steps) -> None:
    assert [part.waits for rank in steps for part in rank if part.waits] == []


def check_products(steps: Steps) -> None:
    assert {dtypes for rank in steps for part in rank for dtypes in part.product_dtypes} == {"bf16 bf16 bf16"}


def check_collectives(steps: Steps) -> None:
    """All members of a group call the same, in the same order."""
    for number in range(2):
        groups = {group for rank in steps for group in rank[number].groups.values()}
        for group in sorted(groups):
            first, *others = (steps[rank][number].in_group(group) for rank in group)
            assert all(other == first for other in others), f"ranks {group} differ"


@pytest.fixture
def steps_of(run_job) -> Callable[[Job], Steps]:
    def steps(job: Job) -> Steps:
        return [[log["step 1"], log["step 2"]] for log in run_job(job)[1]]

    return steps


@pytest.mark.guarantee("cuda-step-without-sync")
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_waits_for_nothing_and_its_metrics_once(run_job, name: str) -> None:
    _, logs = run_job(LAYOUTS[name])
    for log in logs:
        check_waits([[log[f"step {step}"] for step in range(3)]])
        for step in range(3):
            assert sorted(log[f"fetch {step}"].waits) == ["cudaStreamSynchronize", "device to host 16"]


@pytest.mark.guarantee("cuda-step-without-sync")
@pytest.mark.parametrize("name", LAYOUTS)
def test_products_are_in_bfloat16_and_memory_is_reused(run_job, steps_of, name: str) -> None:
    steps = steps_of(LAYOUTS[name])
    check_products(steps)
    for rank in steps:
        for part in rank:
            assert part.of("unknown") == [], "a function of CUDA whose stub nobody has looked at"
            assert part.of("malloc") == [], "memory beyond the first step's"
    assert all(result.expandable for result in run_job(LAYOUTS[name])[0])


@pytest.mark.guarantee("cuda-step-without-sync")
@pytest.mark.parametrize("name", LAYOUTS)
def test_collectives_and_kernels_are_the_stored_ones(steps_of, name: str) -> None:
    steps = steps_of(LAYOUTS[name])
    check_collectives(steps)
    found = steps[0][1]
    assert all(part.schedule == found.schedule for rank in steps for part in rank), "ranks or steps differ"
    assert all(one.launches == other.launches for one, other in steps)
    launches = max(part.launches for rank in steps for part in rank)  # replicas do not all take part in the norm
    path = SCHEDULES / f"{name}.txt"
    if os.environ.get("LT_RECORD"):
        path.write_text("\n".join(described(found, launches)) + "\n")
    head, stored = read_schedule(path)
    if head["torch"] != TORCH:
        pytest.skip(f"the stored kernels and collectives are those of torch {head['torch']}, not {TORCH}")
    assert found.schedule == stored
    assert found.optimizer_launches == int(head["optimizer"])
    assert 0.9 * int(head["kernels"]) <= launches <= HEADROOM * int(head["kernels"])


def described(part: Part, launches: int) -> list[str]:
    numbers = {"torch": TORCH, "kernels": launches, "optimizer": part.optimizer_launches}
    return [*(f"{name} {value}" for name, value in numbers.items()), "", *part.schedule]


def read_schedule(path: Path) -> tuple[dict[str, str], list[str]]:
    head, _, body = path.read_text().partition("\n\n")
    return dict(line.split() for line in head.splitlines()), body.splitlines()


def test_the_next_blocks_weights_are_asked_for_before_a_block_computes(steps_of) -> None:
    """Three blocks in two micro-batches: forward, then backward; a block's feed-forward alone is three products."""
    schedule = steps_of(LAYOUTS["fsdp"])[0][1].schedule
    gathers = [index for index, line in enumerate(schedule) if line.startswith("all_gather bf16")]
    forward = schedule[: schedule.index("10 products")]
    assert [line.split()[0] for line in forward] == ["all_gather"] * 3 + ["7", "all_gather", "7", "all_gather"]
    # Backward: the last block is still gathered, so the gather before its products is the next one's.
    assert schedule[len(forward) + 1].startswith("all_gather")
    assert schedule[len(forward) + 2] == "14 products"
    assert len(gathers) == 2 * (3 + 2 + 2), "embedding, three blocks and head; two blocks again for their backward"


@pytest.mark.parametrize(
    ("fault", "noticed_by"),
    [
        ("read the loss", check_waits),
        ("product in float32", check_products),
        ("collective on one rank", check_collectives),
    ],
)
def test_the_checks_notice_faults(steps_of, fault: str, noticed_by: Callable[[Steps], None]) -> None:
    steps = steps_of(replace(LAYOUTS["fsdp"], fault=fault))
    for check in (check_waits, check_products, check_collectives):
        if check is noticed_by:
            with pytest.raises(AssertionError):
                check(steps)
        else:
            check(steps)


def test_a_kernel_too_many_is_noticed(steps_of) -> None:
    """Another product in each layer is more than the head-room."""
    launches = steps_of(LAYOUTS["one"])[0][1].launches
    deeper = replace(LAYOUTS["one"], model=tuple({**dict(UNTIED), "n_layers": 4}.items()))
    assert steps_of(deeper)[0][1].launches > HEADROOM * launches
