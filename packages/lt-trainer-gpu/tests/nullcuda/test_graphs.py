"""CUDA graphs of the step on the null device: what is recorded, on which stream, and what a replay asks for.

Steps go through two row lengths: of each the first runs, the second is recorded, and later ones are one launch.
"""

from dataclasses import replace

import pytest
from null_device.ranks import Job
from peaks import job

ROWS = (128, 128, 128, 64, 64, 64, 128)
ON, WITHOUT = "engine.gpu.cuda_graphs=true", ("data.document_mask=false", "engine.gpu.attention=flash")
LITTLE = {"n_layers": 2, "seq_len": 128, "vocab_size": 512, "rows": 4}
CASES: dict[str, tuple[Job, int]] = {
    "documents": (job(ON, **LITTLE), 1 + 4 * 4 + 2),
    "one document": (replace(job(ON, *WITHOUT, **LITTLE), one_document=tuple(range(len(ROWS)))), 1 + 4 * 3 + 2),
    "experts": (job(ON, family="olmoe", **LITTLE), 1 + 4 * 4 + 3),
    "muon": (job(ON, "optimizer.name=muon", **LITTLE, micro_batch_size=4), 1 + 4 + 2),
    "compiled": (job(ON, "engine.gpu.compile=true", **LITTLE, micro_batch_size=4), 1 + 4 + 2),
}
"""Case → job, and copies around a replay: two numbers, the arrays of each micro-batch, what the step returns."""


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=pytest.mark.slow if name == "compiled" else ()) for name in CASES]
)
def test_the_third_step_of_a_shape_is_one_launch(run_job, case: str) -> None:
    asked, copies = CASES[case]
    (result,), (log,) = run_job(replace(asked, row_lengths=ROWS))
    steps = [log[f"step {step}"] for step in range(len(ROWS))]
    (begin,) = {text for step in steps for text in step.of("graph") if text.startswith("begin")}
    recorded, replayed = [begin, "end", "launch"], ["launch"]
    assert [step.of("graph") for step in steps] == [[], recorded, replayed, [], recorded, replayed, replayed]
    for step in steps:
        assert step.of("unknown") == []
        assert {one.stream for one in step.queued()} == {begin.split()[1]}, "the default stream cannot be recorded"
    eager, _, first, *_, last = steps
    assert first.waits == last.waits == []
    assert first.launches == last.launches <= 4 < eager.launches / 10
    assert sum(text.startswith("device to device") for text in last.of("copy")) == copies
    assert result.peak_bytes[2] == result.peak_bytes[1], "a replay's memory counts"


def test_what_cannot_be_recorded_is_one_clear_error(run_job) -> None:
    with pytest.raises(Exception, match=r"cuda_graphs = true: a step cannot be recorded: .*; set it to false"):
        run_job(replace(CASES["documents"][0], row_lengths=ROWS, fault="read the loss"))
