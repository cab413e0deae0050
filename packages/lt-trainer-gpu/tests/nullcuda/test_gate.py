"""The engine with `device = "cuda"` on the null device: what a step asks of a GPU, in several layouts.

Three steps of a little model in each layout. A step waits for nothing and copies nothing to the host; fetching its
metrics does so once. Matrix products are in bfloat16. Collectives, with the products between them, are those stored in
`schedules/`, and kernels are at most a few percent more; after a deliberate change

    LT_RECORD=1 pytest packages/lt-trainer-gpu/tests/nullcuda/test_gate.py

writes both anew, and the diff shows what has changed. They are torch's doing as well, so they hold for the version that
they name. That the checks notice faults is tested at the end.
"""

import os
from collections.abc import Callable, Iterable
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
PP, CP = "parallel.pp=2", "parallel.cp=2"
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
    "pp": Job(model=UNTIED, ranks=2, overrides=(PP,)),
    "pp-fsdp": Job(model=UNTIED, ranks=4, overrides=(PP,)),
    "cp": Job(model=UNTIED, ranks=2, micro_batch_size=4, overrides=(CP,)),
    "fsdp-tp": Job(model=UNTIED, ranks=4, micro_batch_size=2, overrides=(TP, SP)),
}

Steps = list[list[Part]]
"""By rank, the second and the third step; the first also sets FSDP up."""


def check_waits(steps: Steps) -> None:
    assert [part.waits for rank in steps for part in rank if part.waits] == []


def check_products(steps: Steps) -> None:
    assert {dtypes for rank in steps for part in rank for dtypes in part.product_dtypes} == {"bf16 bf16 bf16"}


def check_collectives(steps: Steps) -> None:
    """All ranks of a communicator call the same, in the same order; what one sends the other receives.

    A communicator does one thing after the other, so one that carries both directions could block.
    """
    for number in range(2):
        communicators = {one for rank in steps for one in rank[number].communicators.values()}
        for communicator in sorted(communicators):
            calls = [steps[rank][number].on(communicator) for rank in communicator.ranks]
            if any(call.startswith(("send", "recv")) for call in calls[0]):
                (sender,) = (call for call in calls if call[0].startswith("send"))
                (receiver,) = (call for call in calls if call[0].startswith("recv"))
                calls = [sender, [call.replace("recv", "send") for call in receiver]]
            assert all(other == calls[0] for other in calls), f"ranks {communicator.ranks} differ"


@pytest.fixture
def steps_of(run_job) -> Callable[[Job], Steps]:
    def steps(job: Job) -> Steps:
        return [[log["step 1"], log["step 2"]] for log in run_job(job)[1]]

    return steps


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_waits_for_nothing_and_its_metrics_once(run_job, name: str) -> None:
    _, logs = run_job(LAYOUTS[name])
    for log in logs:
        check_waits([[log[f"step {step}"] for step in range(3)]])
        for step in range(3):
            assert sorted(log[f"fetch {step}"].waits) == ["cudaStreamSynchronize", "device to host 16"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_products_are_in_bfloat16_and_memory_is_reused(run_job, steps_of, name: str) -> None:
    steps = steps_of(LAYOUTS[name])
    check_products(steps)
    for rank in steps:
        for part in rank:
            assert part.of("unknown") == [], "a function of CUDA whose stub nobody has looked at"
            assert part.of("malloc") == [], "memory beyond the first step's"
    assert all(result.expandable for result in run_job(LAYOUTS[name])[0])


@pytest.mark.parametrize("name", LAYOUTS)
def test_collectives_and_kernels_are_the_stored_ones(steps_of, name: str) -> None:
    steps = steps_of(LAYOUTS[name])
    check_collectives(steps)
    for one, other in steps:
        assert one.schedule == other.schedule
        assert one.launches == other.launches
    found = described(last for _, last in steps)
    path = SCHEDULES / f"{name}.txt"
    if os.environ.get("LT_RECORD"):
        path.write_text(f"torch {TORCH}\n\n" + "\n".join(text + "\n" for text in found))
    version, *stored = path.read_text().split("\n\n")
    if version != f"torch {TORCH}":
        pytest.skip(f"the stored kernels and collectives are those of {version}, not {TORCH}")
    assert [without_kernels(text) for text in found] == [without_kernels(text.strip()) for text in stored]
    for now, then in zip(map(kernels, found), map(kernels, stored), strict=True):
        assert 0.9 * then <= now <= HEADROOM * then


@pytest.mark.parametrize(("name", "arrays"), [("one", 3), ("pp", 2)])
def test_token_ids_and_labels_go_to_the_stages_that_use_them(steps_of, name: str, arrays: int) -> None:
    """One stage has positions, ids and labels; of two, the first has no labels and the last no ids."""
    for rank in steps_of(LAYOUTS[name]):
        for part in rank:
            copied = [int(text.split()[-1]) for text in part.of("copy") if "pinned to device" in text]
            # int32; other copies are the documents' boundaries
            assert [n_bytes for n_bytes in copied if n_bytes > 1000] == [4 * 4 * 128 * arrays]


def described(parts: Iterable[Part]) -> list[str]:
    """Return one text for all ranks that do the same: who, how many kernels, and the schedule."""
    ranks: dict[tuple[str, ...], list[int]] = {}
    most: dict[tuple[str, ...], int] = {}
    for rank, part in enumerate(parts):
        key = (f"optimizer {part.optimizer_launches}", *part.schedule)
        ranks.setdefault(key, []).append(rank)
        most[key] = max(most.get(key, 0), part.launches)  # of replicas only the first counts the norm
    return ["\n".join([f"ranks {' '.join(map(str, who))}", f"kernels {most[key]}", *key]) for key, who in ranks.items()]


def kernels(text: str) -> int:
    return int(text.splitlines()[1].split()[1])


def without_kernels(text: str) -> list[str]:
    lines = text.splitlines()
    return [lines[0], *lines[2:]]


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
