"""The formulas of `lt_model.activation_memory` against the tensors that torch really keeps."""

import pytest
import torch

from lt_model import ModelConfig
from lt_model.activation_memory import (
    activation_bytes_per_token,
    block_backward_bytes_per_token,
    loss_bytes,
    loss_chunk_tokens,
    non_block_bytes_per_token,
)
from lt_model.config import LayerKind
from lt_model.decoder import Decoder
from lt_model.loss import default_chunk_tokens
from lt_model.shared_input import apply_to_shared_input
from lt_model.swiglu import swiglu

OLMOE = {
    **{"vocab_size": 96, "hidden_size": 64, "n_heads": 4, "n_kv_heads": 4, "n_layers": 2, "family": "olmoe"},
    **{"n_experts": 8, "expert_size": 80, "intermediate_size": 80, "layers": (LayerKind(experts=True),)},
}
SHAPES = {
    "gqa": ModelConfig(vocab_size=96, hidden_size=64, intermediate_size=160, n_heads=4, n_kv_heads=2, n_layers=3),
    "experts": ModelConfig(**OLMOE, qk_norm="full", experts_per_token=2),
    "experts, shared": ModelConfig(
        **{**OLMOE, "family": "qwen2_moe", "qkv_bias": True},
        **{"experts_per_token": 3, "shared_expert_size": 48, "shared_expert_gate": True},
    ),
    "latents": ModelConfig(
        **{**OLMOE, "family": "deepseek_v3", "router_score": "sigmoid", "selection_bias": True},
        **{"n_groups": 2, "top_groups": 1, "experts_per_token": 3, "shared_expert_size": 160, "expert_scale": 2.5},
        **{"kv_rank": 24, "q_rank": 40, "nope_width": 16, "rope_width": 8, "value_width": 24},
    ),
    "mha, wide": ModelConfig(vocab_size=64, hidden_size=48, intermediate_size=200, n_heads=6, n_kv_heads=6, n_layers=2),
}


def kept_bytes(config: ModelConfig, batch: int, n_tokens: int, dtype: torch.dtype) -> int:
    """Bytes of the distinct storages that the decoder keeps for its backward pass, parameters not counted."""
    model = Decoder(config, attention="sdpa").to(dtype)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, tuple[torch.Tensor, int]] = {}  # the tensor is held so that no address is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and tensor.dim() > 0:
            kept[storage.data_ptr()] = (tensor, storage.nbytes())
        return tensor

    ids = torch.randint(0, config.vocab_size, (batch, n_tokens))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.hidden_states(ids)
    return sum(size for _, size in kept.values())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 2), (torch.float32, 4)])
def test_what_blocks_keep_is_what_the_formula_says(shape: str, dtype: torch.dtype, size: int) -> None:
    config = SHAPES[shape]
    tokens = 2 * 96
    said = config.n_layers * sum(activation_bytes_per_token(config, element_bytes=size).values())
    said += non_block_bytes_per_token(config, element_bytes=size)
    assert kept_bytes(config, 2, 96, dtype) == pytest.approx(said * tokens, rel=0.01)


def test_each_width_counts_by_itself() -> None:
    """A wider feed-forward, one more key head and one more block change the bytes by what the formula says."""
    base = SHAPES["gqa"]
    for change in ({"intermediate_size": 224}, {"n_kv_heads": 4}, {"n_layers": 5}):
        other = ModelConfig(**{**base.to_dict(), "rope_scaling": None, **change})
        found = kept_bytes(other, 1, 64, torch.bfloat16) - kept_bytes(base, 1, 64, torch.bfloat16)
        said = [config.n_layers * sum(activation_bytes_per_token(config).values()) * 64 for config in (other, base)]
        assert found == pytest.approx(said[0] - said[1], rel=0.01), change


def test_recomputation_keeps_less_and_brings_it_back_one_block_at_a_time() -> None:
    config = SHAPES["gqa"]
    none, selective, full = (
        sum(activation_bytes_per_token(config, mode).values()) for mode in ("none", "selective", "full")
    )
    assert full == 2 * config.hidden_size
    assert full < selective < none
    assert {"q_proj", "v_proj", "gate_proj", "down_proj"} < set(activation_bytes_per_token(config, "selective"))
    plain = block_backward_bytes_per_token(config)
    assert block_backward_bytes_per_token(config, "full") - plain == none - full


def test_tensor_parallelism_divides_what_lies_between_the_products() -> None:
    config = SHAPES["gqa"]
    whole, split = activation_bytes_per_token(config), activation_bytes_per_token(config, tp=2)
    for name in ("queries", "keys", "values", "attention output", "softmax normalizers", "gate", "up", "product"):
        assert split[name] == whole[name] / 2, name
    for name in ("input", "first norm", "stream between", "second norm"):
        assert split[name] == whole[name], name
    both = activation_bytes_per_token(config, tp=2, sequence_parallel=True)
    assert both["input"] == whole["input"] / 2
    assert both["first norm"] == pytest.approx(whole["first norm"], rel=0.05)  # gathered for the products


def test_the_loss_holds_a_chunk() -> None:
    config = SHAPES["gqa"]
    held = loss_bytes(config, 4096, chunk_tokens=256)
    assert held["logits"] == 256 * 96 * 6
    assert loss_bytes(config, 4096, chunk_tokens=16)["logits"] == 96 * 64 * 2  # the rounded gradient takes more
    assert held["gradient of the head"] == 96 * 64 * 4
    whole = loss_bytes(config, 100, chunk_tokens=256)
    assert (whole["logits"], whole["gradient of the head"]) == (100 * 96 * 6, 96 * 64 * 2)
    of_rank = loss_bytes(config, 4096, chunk_tokens=256, tp=4)
    assert of_rank == held | {name: held[name] / 4 for name in ("logits", "gradient of the head")}
    for vocab in (96, 32000, 128_256):
        weight = torch.empty(vocab, 8, device="meta")
        assert loss_chunk_tokens(vocab) == default_chunk_tokens(torch.empty(4, 8, device="meta"), weight)


def test_swiglu_is_its_formula_and_keeps_two_tensors() -> None:
    gate, up = (torch.randn(5, 7, dtype=torch.float64, requires_grad=True) for _ in range(2))
    plain = torch.nn.functional.silu(gate) * up
    assert torch.equal(swiglu(gate, up), plain)
    upstream = torch.randn_like(plain)
    wanted = torch.autograd.grad(plain, (gate, up), upstream)
    found = torch.autograd.grad(swiglu(gate, up), (gate, up), upstream)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=0)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        swiglu(gate, up)
    assert len(kept) == 2


def test_layers_of_one_input_have_the_gradients_of_each() -> None:
    """Also of another class, whose own forward pass is used, and with a bias."""
    x = torch.randn(2, 5, 7, dtype=torch.float64, requires_grad=True)
    layers = [torch.nn.Linear(7, n, bias=False, dtype=torch.float64) for n in (3, 4, 6)]
    leaves, upstream = (x, *(layer.weight for layer in layers)), [torch.randn(2, 5, n).double() for n in (3, 4, 6)]
    plain = [layer(x) for layer in layers]
    wanted = torch.autograd.grad(plain, leaves, upstream)
    found = apply_to_shared_input(x, *layers)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    for a, b in zip(torch.autograd.grad(found, leaves, upstream), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-14)
    layers[1] = torch.nn.Linear(7, 4, dtype=torch.float64)
    assert torch.equal(apply_to_shared_input(x, *layers)[1], layers[1](x))
    layers[1] = type("Doubled", (torch.nn.Linear,), {"forward": lambda self, x: 2 * x})(7, 7, bias=False)
    assert torch.equal(apply_to_shared_input(x, *layers)[1], 2 * x)
