"""Layers of pipeline stages."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from lt_model import ModelConfig, stage_layers


@given(st.integers(1, 90), st.integers(1, 16), st.integers(16, 200_000), st.booleans())
def test_stages_are_balanced(n_layers: int, n_stages: int, vocab: int, tied: bool) -> None:
    n_stages = min(n_stages, n_layers)
    config = ModelConfig(
        vocab_size=vocab,
        hidden_size=64,
        intermediate_size=160,
        n_heads=4,
        n_kv_heads=2,
        n_layers=n_layers,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    layers = stage_layers(config, n_stages)
    assert [index for stage in layers for index in stage] == list(range(n_layers))
    assert all(len(stage) > 0 for stage in layers)
    sizes = [len(stage) for stage in layers[:-1]]
    assert all(b - a >= 0 for a, b in pairwise(sizes))
    assert not sizes or sizes[-1] - sizes[0] <= 1


def test_the_head_counts_as_layers() -> None:
    # Llama 3 8B: the head has as many weights as 2.4 blocks.
    config = ModelConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        n_heads=32,
        n_kv_heads=8,
        n_layers=32,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )
    assert [len(stage) for stage in stage_layers(config, 4)] == [8, 9, 9, 6]
