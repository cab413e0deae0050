"""Rotary tables in narrow dtypes, and the turn itself. (Angles against those of transformers: test_parity.py.)"""

import pytest

torch = pytest.importorskip("torch")

from lt_model.config import Rope  # noqa: E402
from lt_model.rope import apply_rope, inverse_frequencies, rope_tables  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_positions_are_told_apart_however_narrow_the_tables_are(config, dtype):
    """In bfloat16 the whole numbers end at 256: angles that were made in it would turn later positions alike."""
    positions = torch.arange(4096)
    exact = positions.double()[:, None, None] * inverse_frequencies(config.rope(0), torch.float64)
    for found, wanted in zip(rope_tables(config.rope(0), positions, dtype), (exact.cos(), exact.sin()), strict=True):
        assert found.dtype == dtype
        near = 4096 * 2**-23 + torch.finfo(dtype).eps  # of an angle in fp32, and of the rounding at the end
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=near)


def test_pairs_lie_half_a_head_apart_and_turn_by_their_angle(gqa_config):
    positions = torch.tensor([0, 1, 7])
    angles = positions.double()[:, None] * inverse_frequencies(gqa_config.rope(0), torch.float64)
    half = gqa_config.head_width // 2
    x = torch.zeros(1, 3, 1, gqa_config.head_width, dtype=torch.float64)
    x[..., :half] = 1.0
    turned = apply_rope(x, rope_tables(gqa_config.rope(0), positions, torch.float64))[0, :, 0]
    torch.testing.assert_close(turned[:, :half], angles.cos(), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(turned[:, half:], angles.sin(), rtol=1e-14, atol=1e-14)


def test_tables_without_memory_leave_none_behind():
    from torch._subclasses.fake_tensor import FakeTensorMode

    rope = Rope(theta=1234.5, width=8, scaling=None)
    with FakeTensorMode():
        rope_tables(rope, torch.arange(3), torch.float32)
    cos, _ = rope_tables(rope, torch.arange(3), torch.float32)
    assert cos.flatten()[0].item() == 1
