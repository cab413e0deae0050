"""What is true of a CUDA device alone: the host never waits in a step, and what bfloat16, memory and peaks are there.

The same steps as on the CPU are in test_engine.py, which runs on both.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from lt_model import ModelConfig
from lt_test_helpers.layouts import step_batch
from lt_trainer.engine import StepBatch, StepMetrics
from lt_trainer_gpu.engine import GpuEngine

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]

LONG = 128
MASKED = ModelConfig(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    n_heads=4,
    n_kv_heads=2,
    n_layers=2,
    max_position_embeddings=LONG,
)
"""Heads of 64 and rows of 128: a shape that the fused kernels for attention take."""


@pytest.fixture
def open_engine(open_on) -> Callable[..., GpuEngine]:
    return lambda config, *sets: open_on("cuda", config, *sets)


@contextmanager
def refusing_to_wait() -> Iterator[None]:
    """Inside, whatever would make the host wait for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def documents(n_steps: int, *, rows: int, seed: int = 0) -> list[StepBatch]:
    """Batches [1, rows, LONG] for `MASKED`, each row two documents of uneven length."""
    rng = np.random.default_rng(seed)
    batches = []
    for _ in range(n_steps):
        ids = rng.integers(0, MASKED.vocab_size, (1, rows, LONG + 1), dtype=np.int32)
        cuts = rng.integers(1, LONG, (1, rows, 1))
        counting = np.arange(LONG, dtype=np.int32)
        doc_ids = (counting >= cuts).astype(np.int32)
        positions = (counting - doc_ids * cuts).astype(np.int32)
        labels = np.where(counting == cuts - 1, np.int32(-100), ids[..., 1:])
        batches.append(
            step_batch(
                input_ids=np.ascontiguousarray(ids[..., :-1]),
                labels=labels,
                position_ids=positions,
                doc_ids=doc_ids,
                valid_tokens=int((labels != -100).sum()),
            )
        )
    return batches


def state(engine: GpuEngine) -> dict[tuple[str, str], bytes]:
    return {(shard.group, shard.name): shard.bytes().tobytes() for shard in engine.state().shards}


def train(engine: GpuEngine, steps: list[StepBatch], lr: float = 1e-3) -> list[StepMetrics]:
    return engine.fetch_metrics([engine.step(batch, lr) for batch in steps])


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_initial_weights_have_the_same_bits_as_on_the_cpu(open_on, config, dtype) -> None:
    found = state(open_on("cuda", config, f"engine.gpu.dtype={dtype}"))
    assert found == state(open_on("cpu", config, f"engine.gpu.dtype={dtype}"))


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_a_step_never_waits_for_the_device(open_engine, config, batches, dtype) -> None:
    """Also one that is skipped, and also with more tokens than the embedding's small kernel takes (3072)."""
    engine = open_engine(config, f"engine.gpu.dtype={dtype}")
    (small,) = batches(1, n_micro=2, micro_batch_size=2)
    (large,) = batches(1, n_micro=1, micro_batch_size=160)
    steps = [small, large, replace(small, valid_tokens=0)]
    warm = [engine.step(batch, 1e-3) for batch in steps]
    with refusing_to_wait():
        pendings = [engine.step(batch, 1e-3) for batch in steps]
    assert [n.is_finite for n in engine.fetch_metrics(warm + pendings)] == [True, True, False] * 2


def test_waiting_would_be_noticed(open_engine, config, batches) -> None:
    """The test above can fail: reading a step's numbers is such a wait."""
    engine = open_engine(config)
    pending = engine.step(batches(1, n_micro=1, micro_batch_size=2)[0], 1e-3)
    with refusing_to_wait(), pytest.raises(RuntimeError, match="synchroniz"):
        pending.loss.item()


@pytest.mark.parametrize("compile", ["false", "true"])
def test_graphs_change_no_value(open_engine, compile) -> None:
    """Ten steps of documents in two numbers of rows, one of them skipped; the learning rate differs each time."""
    few, many = documents(5, rows=4), documents(5, rows=8)
    steps = [*few, *many[:2], replace(many[2], valid_tokens=0), *many[3:]]
    runs: list[list[StepMetrics]] = []
    for graphs in ("false", "true"):
        sets = (f"engine.gpu.compile={compile}", f"engine.gpu.cuda_graphs={graphs}")
        engine = open_engine(MASKED, "engine.gpu.dtype=bfloat16", *sets)
        runs.append(engine.fetch_metrics([engine.step(batch, 1e-3 / (1 + n)) for n, batch in enumerate(steps)]))
    for number, (wanted, found) in enumerate(zip(*runs, strict=True)):
        assert found.is_finite == wanted.is_finite == (number != 7)
        values = pytest.approx((wanted.loss, wanted.grad_norm), rel=1e-3, nan_ok=True)
        assert (found.loss, found.grad_norm) == values


def test_bfloat16_is_close_to_float32(open_engine) -> None:
    """bfloat16 has 8 bits: 0.4 % per number, of which little is left in a mean over many."""
    steps = documents(5, rows=8)
    wanted = train(open_engine(MASKED, "engine.gpu.dtype=float32"), steps)
    found = train(open_engine(MASKED, "engine.gpu.dtype=bfloat16"), steps)
    assert [n.loss for n in found] == pytest.approx([n.loss for n in wanted], rel=1e-3)
    assert [n.grad_norm for n in found] == pytest.approx([n.grad_norm for n in wanted], rel=1e-2)
    assert wanted[-1].loss != wanted[0].loss, "nothing was learnt"


@pytest.mark.parametrize(("dtype", "loss_near", "norm_near"), [("float32", 1e-5, 1e-4), ("bfloat16", 3e-4, 3e-3)])
def test_fused_attention_keeps_documents_apart_as_the_reference_does(open_engine, dtype, loss_near, norm_near) -> None:
    """Attending to the other document of a row as well changes the loss by a thousandth."""
    steps = documents(3, rows=8)
    sets = (f"engine.gpu.dtype={dtype}",)
    wanted = train(open_engine(MASKED, "engine.gpu.attention=reference", *sets), steps)
    found = train(open_engine(MASKED, *sets), steps)
    assert [n.loss for n in found] == pytest.approx([n.loss for n in wanted], rel=loss_near)
    assert [n.grad_norm for n in found] == pytest.approx([n.grad_norm for n in wanted], rel=norm_near)


def test_memory_is_the_devices_peak_since_it_was_last_asked(open_engine) -> None:
    engine = open_engine(MASKED, "engine.gpu.dtype=bfloat16")
    weights = sum(shard.n_bytes for shard in engine.state().shards if shard.group == "weights")
    assert engine.state_bytes() == 3 * weights
    train(engine, documents(1, rows=64))
    large = engine.peak_memory_bytes()
    train(engine, documents(1, rows=1))
    small = engine.peak_memory_bytes()
    # Weights, two moments and gradients in float32, and what 64 rows leave behind in bfloat16, are held at once.
    assert 4 * weights < small < large < torch.cuda.get_device_properties(0).total_memory


def test_host_memory_for_copies_is_page_locked_and_given_back(open_engine) -> None:
    engine = open_engine(MASKED)
    for _ in range(3):  # locking an address a second time would be refused
        memory = engine.allocate_host_memory(2**20 + 1)
        assert memory.shape == (2**20 + 1,)
        assert torch.from_numpy(memory).is_pinned()
        del memory
