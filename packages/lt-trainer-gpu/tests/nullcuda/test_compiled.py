"""Compiled blocks on the null device: Inductor and Triton are real, so graphs and launches are those of a GPU.

Steps go twice through all combinations of two row lengths with and without several documents in a row. Once each has
been met, nothing is compiled any more and Triton launches the same number of kernels. Cost: two minutes for each test.
"""

import pytest
from null_device.ranks import Job

SHAPE = {"hidden_size": 256, "intermediate_size": 512, "n_heads": 4, "n_kv_heads": 2, "n_layers": 3}
COMPILED = ("engine.gpu.compile=true", "data.packing=buckets", "data.min_seq_len=64")
KINDS = 4
MAX_GRAPHS = 2 * KINDS
"""Of the block and of the loss, each at most one for each combination."""


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_nothing_is_compiled_once_each_kind_of_row_was_met(run_job, checkpointing: str) -> None:
    job = Job(
        model=(*SHAPE.items(), ("tie_word_embeddings", False)),
        row_lengths=(128, 64) * KINDS,
        one_document=(2, 3, 6, 7),
        overrides=(*COMPILED, f"engine.gpu.activation_checkpointing={checkpointing}"),
    )
    (result,), (log,) = run_job(job)
    steps = [log[f"step {step}"] for step in range(2 * KINDS)]
    assert 0 < result.graphs[0] <= result.graphs[KINDS - 1] <= MAX_GRAPHS
    assert set(result.graphs[KINDS:]) == {result.graphs[KINDS - 1]}
    again = steps[KINDS:]
    assert {part.triton_launches for part in again} == {again[0].triton_launches}
    assert again[0].triton_launches > 0
    assert [part.waits for part in again if part.waits] == []
    assert {dtypes for part in again for dtypes in part.product_dtypes} == {"bf16 bf16 bf16"}
    assert [part.of("unknown") for part in again if part.of("unknown")] == []
