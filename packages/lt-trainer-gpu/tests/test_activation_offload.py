"""Activations that went to the host and back: the same bits, on a CPU; what is moved and when it comes back."""

import gc
from typing import Any

import pytest
import torch

from lt_model import ModelConfig
from lt_model.decoder import Decoder
from lt_model.init import init_model
from lt_test_helpers import layouts
from lt_test_helpers.layouts import TrainResult
from lt_trainer_gpu import activation_offload
from lt_trainer_gpu.activation_offload import ActivationOffload, SavedBlock, apply_activation_offload

MODEL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "n_heads": 4, "n_kv_heads": 4, "n_layers": 4}
VOCAB, SEQ_LEN, ROWS = 61, 16, 4
CONFIG = ModelConfig(vocab_size=VOCAB, max_position_embeddings=SEQ_LEN, **MODEL)
CPU = torch.device("cpu")


def train(sets: tuple[str, ...], micro_batch_size: int) -> tuple[TrainResult, int]:
    """One rank's training in that rank, and the bytes that it moved."""
    activation_offload.MIN_BYTES = 1
    moved: list[ActivationOffload] = []
    apply = activation_offload.apply_activation_offload
    activation_offload.apply_activation_offload = lambda *args: moved.append(apply(*args)) or moved[-1]
    engine = layouts.open_engine(*sets, model=MODEL, rows=ROWS, seq_len=SEQ_LEN, vocab=VOCAB)
    batches = layouts.global_batches(4, rows=ROWS, seq_len=SEQ_LEN, vocab=VOCAB)
    result = layouts.train_steps(engine, batches[:3], batches[3], micro_batch_size, lambda: engine.state().shards)
    return result, sum(one.moved_bytes for one in moved)


OFFLOAD = "engine.gpu.activation_offload=true"
FULL, SELECTIVE = "engine.gpu.activation_checkpointing=full", "engine.gpu.activation_checkpointing=selective"
LAYOUTS: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "one": (1, 2, ()),
    "recompute-all": (1, 2, (FULL,)),
    "recompute-selectively": (1, 2, (SELECTIVE,)),
    "fp8": (1, 2, ("engine.gpu.fp8=rowwise", "model.intermediate_size=48")),
    "bf16-weights": (1, 2, ("engine.gpu.dtype=bfloat16", "optimizer.weights_dtype=bfloat16")),
    "fsdp": (2, 1, ()),
    "fsdp-recompute-all": (2, 1, (FULL,)),
    "tp-sp": (2, 2, ("parallel.tp=2", "parallel.sequence_parallel=true")),
    "pp": (2, 1, ("parallel.pp=2",)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_training_has_the_same_bits(ranks, name: str) -> None:
    """Weights and moments after 3 steps with two micro-batches or more each."""
    n, micro, sets = LAYOUTS[name]
    plain = ranks.run(train, sets, micro, ranks=n)
    found = ranks.run(train, (*sets, OFFLOAD), micro, ranks=n)
    for (ours, moved), (theirs, not_moved) in zip(found, plain, strict=True):
        assert moved > 3 * SEQ_LEN * 32 * 8
        assert not_moved == 0
        assert (ours.losses, ours.grad_norms, ours.validation) == (theirs.losses, theirs.grad_norms, theirs.validation)
        for mine, other in zip(ours.states, theirs.states, strict=True):
            assert [(one.group, one.name) for one in mine] == [(one.group, one.name) for one in other]
            assert all((a.values == b.values).all() for a, b in zip(mine, other, strict=True))


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Decoder:
    """A model in float64, and no tensor too small to be moved."""
    monkeypatch.setattr(activation_offload, "MIN_BYTES", 1)
    made = Decoder(CONFIG, attention="sdpa").to(torch.float64)
    init_model(made, seed=0)
    return made


def loss_of(model: Decoder) -> torch.Tensor:
    ids = torch.arange(2 * SEQ_LEN).view(2, SEQ_LEN) % VOCAB
    loss = model(ids, labels_BT=ids)
    assert isinstance(loss, torch.Tensor)
    return loss


def test_all_blocks_but_the_last_are_moved_and_parameters_are_not(model: Decoder) -> None:
    """Of a block: 4 D of the norms' ends, queries, keys, values and attention's output, gate, up and their product."""
    offload = apply_activation_offload(list(model.model.layers), CPU)
    loss_of(model)
    tokens, width, inner, heads = 2 * SEQ_LEN, 32, 48, 4
    floats = 4 * width + 2 * 1 + 4 * width + 3 * inner
    normalizers = heads
    assert offload.moved_bytes == 3 * tokens * (floats + normalizers) * 8
    assert not any(hasattr(block.forward, "__self__") for block in list(model.model.layers)[:-1])
    assert model.model.layers[-1].forward.__func__ is type(model.model.layers[-1]).forward  # pyright: ignore[reportFunctionMemberAccess]


def test_blocks_come_back_one_ahead(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first tensor that is needed of a block has its own and the previous one fetched, each once."""
    fetched: list[SavedBlock] = []
    fetch = SavedBlock.fetch

    def recorded(self: SavedBlock, *args: Any) -> None:
        if not self._is_fetched:
            fetched.append(self)
        fetch(self, *args)

    monkeypatch.setattr(SavedBlock, "fetch", recorded)
    offload = apply_activation_offload(list(model.model.layers), CPU)
    loss = loss_of(model)
    third = offload._last
    assert third is not None
    assert third.previous is not None
    first = third.previous.previous
    assert first is not None
    assert first.previous is None
    loss.backward()
    assert fetched == [third, third.previous, first]


def test_host_memory_is_free_after_the_backward_pass(model: Decoder) -> None:
    offload = apply_activation_offload(list(model.model.layers), CPU)
    loss = loss_of(model)
    held = []
    block = offload._last
    while block is not None:
        held += block._tensors
        block = block.previous
    assert len(held) == 3 * 14
    assert all(one() is not None for one in held)
    loss.backward()
    gc.collect()
    assert all(one() is None for one in held)


def test_small_tensors_stay(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "MIN_BYTES", 1 << 20)
    offload = apply_activation_offload(list(model.model.layers), CPU)
    loss_of(model).backward()
    assert offload.moved_bytes == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch's own, while it traces
def test_compiled_blocks_have_the_same_gradients(model: Decoder) -> None:
    model.float()  # torch 2.11 compiles no float64 attention on a CPU

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        loss_of(model).backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    for block in model.model.layers:
        block.forward = torch.compile(block.forward, fullgraph=True)
    plain = gradients()
    offload = apply_activation_offload(list(model.model.layers), CPU)  # pyright: ignore[reportArgumentType]
    moved = gradients()
    assert offload.moved_bytes > 0
    assert all(torch.equal(a, b) for a, b in zip(plain, moved, strict=True))
