"""Compiled blocks on the null device: Inductor and Triton are real, so graphs and launches are those of a GPU.

Steps go twice through all combinations of two row lengths with and without several documents in a row. Once each has
been met, nothing is compiled any more and rows of one length launch the same number of Triton's kernels. Cost: one
minute for each test.
"""

import pytest
from null_device.ranks import Job

SHAPE = {"hidden_size": 256, "intermediate_size": 512, "n_heads": 4, "n_kv_heads": 2, "n_layers": 3}
COMPILED = ("engine.gpu.compile=true",)
LENGTHS = (128, 64)
KINDS = 4
MAX_GRAPHS = 2 * KINDS
"""Of the block and of the loss, each at most one for each combination."""

CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "none": (1, ()),
    "full": (1, ("engine.gpu.activation_checkpointing=full",)),
    "selective": (1, ("engine.gpu.activation_checkpointing=selective",)),
    "memory-budget": (
        1,
        ("engine.gpu.activation_checkpointing=memory_budget", "engine.gpu.activation_memory_budget=0.5"),
    ),
    "fsdp": (2, ()),
    "tp-sp": (2, ("parallel.tp=2", "parallel.sequence_parallel=true")),
    "pp": (2, ("parallel.pp=2",)),
    "cp": (2, ("parallel.cp=2",)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_nothing_is_compiled_once_each_kind_of_row_was_met(run_job, case: str) -> None:
    ranks, sets = CASES[case]
    job = Job(
        model=(*SHAPE.items(), ("tie_word_embeddings", False)),
        ranks=ranks,
        row_lengths=LENGTHS * KINDS,
        one_document=(2, 3, 6, 7),
        overrides=(*COMPILED, *sets),
    )
    for result, log in zip(*run_job(job), strict=True):
        steps = [log[f"step {step}"] for step in range(2 * KINDS)]
        assert 0 < result.graphs[0] <= result.graphs[KINDS - 1] <= MAX_GRAPHS
        assert set(result.graphs[KINDS:]) == {result.graphs[KINDS - 1]}
        again = steps[KINDS:]
        for rows_of_one_length in (again[::2], again[1::2]):
            assert len({part.triton_launches for part in rows_of_one_length}) == 1
            assert rows_of_one_length[0].triton_launches > 0
        assert [part.waits for part in again if part.waits] == []
        assert {dtypes for part in again for dtypes in part.product_dtypes} == {"bf16 bf16 bf16"}
        assert [part.of("unknown") for part in again if part.of("unknown")] == []
