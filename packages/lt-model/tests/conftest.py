"""Shapes and an oracle shared by the tests."""

import pytest

from lt_model import ModelConfig, RopeScaling

SHAPE = {"vocab_size": 101, "hidden_size": 48, "intermediate_size": 72, "n_layers": 3, "max_position_embeddings": 64}
SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
VARIANTS = {
    "mha": ModelConfig(**SHAPE, n_heads=4, n_kv_heads=4),
    "gqa": ModelConfig(**SHAPE, n_heads=6, n_kv_heads=2),
    "mqa": ModelConfig(**SHAPE, n_heads=4, n_kv_heads=1, norm_eps=1e-3),
    "tied": ModelConfig(**SHAPE, n_heads=6, n_kv_heads=3, tie_word_embeddings=True),
    # theta 100 puts wavelengths on both sides of both limits of the rule, and between them.
    "llama3-rope": ModelConfig(**SHAPE, n_heads=4, n_kv_heads=2, rope_theta=100.0, rope_scaling=SCALING),
}


@pytest.fixture(params=VARIANTS)
def config(request):
    """Each kind of Llama in a small size."""
    return VARIANTS[request.param]


@pytest.fixture
def gqa_config():
    """One small grouped-query Llama."""
    return VARIANTS["gqa"]


@pytest.fixture
def make_model():
    """Return a function: config -> float64 Llama with large random weights, so that mistakes show in every gradient."""
    import torch

    from lt_model import Decoder

    def make(config, *, attention="sdpa", dtype=torch.float64, seed=0):
        model = Decoder(config, attention=attention).to(dtype)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(1 + 0.3 * noise if parameter.dim() == 1 else 0.2 * noise)
        return model

    return make
