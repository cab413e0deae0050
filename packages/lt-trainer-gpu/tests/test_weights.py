"""One process that computes in bfloat16: masters beside the model, against the same arithmetic spelled out."""

from pathlib import Path

import numpy as np
import pytest
import torch

from lt_ckpt import Checkpoint
from lt_model import param_specs
from lt_model.decoder import Decoder
from lt_model.init import init_model
from lt_test_helpers.layouts import save_checkpoint
from lt_trainer_gpu.engine import GpuEngine
from lt_trainer_gpu.weights import MixedPrecisionWeights

BF16 = "engine.gpu.dtype=bfloat16"


def spelled_out(config, batches, lr: float, clip: float) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Gradients of a bfloat16 copy of fp32 weights, widened and summed in fp32, clipped, and torch's AdamW."""
    masters = Decoder(config)
    init_model(masters, seed=0)
    decays = {row.name for row in param_specs(config) if row.decay}
    groups = [
        {"params": [p for n, p in masters.named_parameters() if n in decays], "weight_decay": 0.01},
        {"params": [p for n, p in masters.named_parameters() if n not in decays], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8, fused=True)
    norms = []
    for batch in batches:
        model = Decoder(config, attention="sdpa").to(torch.bfloat16)
        model.load_state_dict(masters.state_dict())
        for row in range(batch.input_ids.shape[0]):
            ids, positions, docs, labels = (
                torch.from_numpy(array[row]).long()
                for array in (batch.input_ids, batch.position_ids, batch.doc_ids, batch.labels)
            )
            model.zero_grad()
            loss = model(ids, position_ids_BT=positions, doc_ids_BT=docs, labels_BT=labels)
            (loss / batch.valid_tokens).backward()
            for master, narrow in zip(masters.parameters(), model.parameters(), strict=True):
                assert narrow.grad is not None
                wide = narrow.grad.float()
                master.grad = wide if master.grad is None else master.grad + wide
        norms.append(float(torch.nn.utils.clip_grad_norm_(masters.parameters(), clip)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, {name: tensor.detach() for name, tensor in masters.named_parameters()}


def weights_of(engine: GpuEngine) -> dict[str, np.ndarray]:
    return {s.name: s.bytes().view(np.float32).copy() for s in engine.state().shards if s.group == "weights"}


@pytest.mark.parametrize("n_micro", [1, 3])
def test_masters_move_as_if_everything_were_written_out(open_on, config, batches, n_micro: int) -> None:
    steps = batches(2, n_micro=n_micro, micro_batch_size=2)
    norms, _ = spelled_out(config, steps, lr=1e-2, clip=0.3)
    _, wanted = spelled_out(config, steps[:1], lr=1e-2, clip=0.3)
    engine = open_on("cpu", config, BF16, "optimizer.grad_clip=0.3", "engine.gpu.attention=sdpa")
    (first,) = engine.fetch_metrics([engine.step(steps[0], 1e-2)])
    found = weights_of(engine)
    for name, tensor in wanted.items():
        assert np.abs(found[name] - tensor.numpy().ravel()).max() < 1e-6, name  # a step of this lr goes 1e-2
    # Weights that differ in their last bits round to other bfloat16 numbers now and then.
    (second,) = engine.fetch_metrics([engine.step(steps[1], 1e-2)])
    assert [first.grad_norm, second.grad_norm] == pytest.approx(norms, rel=1e-3)
    assert min(norms) > 0.3, "nothing was clipped"


def test_small_updates_are_not_lost(open_on, config, batches) -> None:
    """Twenty updates of 1e-5 reach the masters though each is below half the distance of two bfloat16 numbers."""
    engine = open_on("cpu", config, BF16)
    before = weights_of(engine)
    for batch in batches(20, n_micro=1, micro_batch_size=2):
        engine.step(batch, 1e-5)
    after = weights_of(engine)
    name = "model.norm.weight"  # ones: the next bfloat16 numbers are 2^-8 below and 2^-7 above
    assert 0 < np.abs(after[name] - before[name]).max() < 2**-9


def test_a_restored_engine_computes_with_what_it_restored(open_on, config, batches, tmp_path: Path) -> None:
    steps = batches(3, n_micro=1, micro_batch_size=2)
    engine = open_on("cpu", config, BF16)
    for batch in steps[:2]:
        engine.step(batch, 1e-2)
    place = save_checkpoint(engine, str(tmp_path), step=2)
    wanted = engine.validate(steps[2:])
    (next_loss,) = engine.fetch_metrics([engine.step(steps[2], 1e-2)])

    other = open_on("cpu", config, BF16, "run.seed=7")
    assert other.validate(steps[2:]) != wanted
    other.restore(Checkpoint.open(place))
    assert other.validate(steps[2:]) == wanted
    assert other.fetch_metrics([other.step(steps[2], 1e-2)]) == [next_loss]


def test_sums_are_kept_in_the_masters_dtype_and_gradients_let_go_of() -> None:
    """1 + 2^-9 is no bfloat16 number: a sum in bfloat16 would stay at 1."""
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    narrow = MixedPrecisionWeights(dict(model.named_parameters()), torch.float32)
    narrow.master_weights["weight"].fill_(2.0)
    narrow.sync_model()
    assert model.weight.item() == 2.0
    for gradient in (1.0, 2.0**-9):
        narrow.is_accumulating = True
        (model.weight * torch.tensor(gradient, dtype=torch.bfloat16)).sum().backward()
        assert model.weight.grad is None
    assert narrow.gradients()["weight"].item() == 1 + 2**-9
    narrow.sync_model()
    narrow.is_accumulating = False
    (model.weight * 3).sum().backward()
    assert narrow.gradients()["weight"].dtype == torch.bfloat16
    assert narrow.gradients()["weight"].item() == 3
