"""Activation offload on the null device: nothing waits, what goes out comes back, two blocks' activations stay."""

from collections.abc import Callable
from typing import Any

import pytest
from null_device.ranks import Job
from peaks import check_peak, job

OFFLOAD = "engine.gpu.activation_offload=true"
CASES = {
    "one": job(OFFLOAD, vocab_size=1024),
    "fsdp-accumulation": job(OFFLOAD, ranks=2, rows=4, vocab_size=1024),
}


def copied(copies: list[str], what: str) -> int:
    """Bytes of copies in one direction that are large enough to be activations."""
    sizes = [int(text.split()[-1]) for text in copies if what in text]
    return sum(size for size in sizes if size >= 1 << 20)


@pytest.mark.parametrize("case", CASES)
def test_a_step_with_offload_does_not_wait(run_job: Callable[[Job], Any], case: str) -> None:
    for log in run_job(CASES[case])[1]:
        part = log["step 2"]
        assert part.of("sync") == []
        assert copied(part.of("copy"), "to host") == copied(part.of("copy"), "pinned to device") > 1 << 30


@pytest.mark.parametrize("case", CASES)
def test_the_device_holds_what_the_plan_says(run_job: Callable[[Job], Any], case: str) -> None:
    check_peak(CASES[case], run_job(CASES[case])[0])
