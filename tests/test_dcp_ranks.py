"""Checkpoints of torch.distributed.checkpoint that real ranks with FSDP2 write and read, against ours."""

from pathlib import Path

import pytest

from lt_ckpt.conversion import convert
from lt_ckpt.dcp.format import dcp_target, open_dcp
from lt_model import ModelConfig, config_to_hf
from lt_test_helpers.pool import RankPool

CONFIG = ModelConfig(
    vocab_size=29, hidden_size=16, intermediate_size=20, n_heads=2, n_kv_heads=1, n_layers=2, max_position_embeddings=16
)
"""Odd numbers of rows, so that the ranks' shares differ."""


@pytest.fixture(scope="module")
def ranks() -> RankPool:
    return RankPool(3)


def train_and_save(config, seed, steps, folder):
    """In each rank: an FSDP2 model after some steps, saved with its optimizer; returns the whole tensors as bytes."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
    from torch.distributed.fsdp import fully_shard

    from lt_model import Decoder

    dist.init_process_group("gloo")
    torch.manual_seed(seed)
    model = Decoder(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        sum((parameter * parameter).sum() for parameter in model.parameters()).backward()
        optimizer.step()
        optimizer.zero_grad()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    sharded = {
        "model": get_model_state_dict(model, options=options),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
    dcp.save(sharded, checkpoint_id=folder)
    whole = {name: tensor.full_tensor().numpy().tobytes() for name, tensor in sharded["model"].items()}
    moments = {
        name: value.full_tensor().numpy().tobytes()
        for name, value in sharded["optimizer"].items()
        if name.endswith(("exp_avg", "exp_avg_sq"))
    }
    dist.destroy_process_group()
    return whole, moments


def load_sharded(config, folder):
    """In each rank: our folder into an FSDP2 model with other weights; returns the whole tensors as bytes."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    from lt_model import Decoder

    dist.init_process_group("gloo")
    model = Decoder(config)
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
    fully_shard(model)
    content = get_model_state_dict(model)
    dcp.load(content, checkpoint_id=folder)
    set_model_state_dict(model, content)
    whole = {name: tensor.full_tensor().detach().numpy().tobytes() for name, tensor in model.named_parameters()}
    dist.destroy_process_group()
    return whole


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_fsdp_ranks_write_what_we_read_and_read_what_we_write(tmp_path: Path, ranks: RankPool, n_ranks: int) -> None:
    results = ranks.run(train_and_save, CONFIG, 3, 2, tmp_path / "theirs", ranks=n_ranks)
    whole, moments = results[0]
    assert all(result == results[0] for result in results)
    source = open_dcp(tmp_path / "theirs", config=config_to_hf(CONFIG))
    assert len(list((tmp_path / "theirs").glob("*.distcp"))) == n_ranks
    assert set(source.groups) == {"weights", "exp_avg", "exp_avg_sq"}
    for name, data in whole.items():
        assert source.read(name).tobytes() == data, name
    for kind in ("exp_avg", "exp_avg_sq"):
        for name in whole:
            assert source.read(name, group=kind).tobytes() == moments[f"state.{name}.{kind}"], name
    convert(source, dcp_target(source), tmp_path / "ours")
    loaded = ranks.run(load_sharded, CONFIG, tmp_path / "ours", ranks=2)
    assert loaded == [whole, whole]
