"""Stochastic rounding: its bits in plain integers, slices of any parameter, and means."""

import numpy as np
import pytest
import torch

from lt_model.params import ParamSpec
from lt_model.stochastic_rounding import round_stochastically, rounding_key

WORD = 1 << 64
GAMMA = 0x9E3779B97F4A7C15


def spec_of(*shape: int) -> ParamSpec:
    return ParamSpec("w", shape, 0, "matrix", tp_dim=None, init=0.02)


def finalize(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % WORD
    return z ^ (z >> 31)


def rounded(values: torch.Tensor, spec: ParamSpec, *, seed: int = 3, step: int = 5, offset: tuple[int, ...] = ()):
    target = torch.zeros_like(values, dtype=torch.bfloat16)
    round_stochastically(
        target,
        values,
        spec,
        key=rounding_key(seed, spec),
        step=torch.tensor(step, dtype=torch.int32),
        offset=offset or (0,) * values.ndim,
    )
    return target


@pytest.mark.parametrize("shape", [(3, 8), (4, 7), (9,)])
def test_the_bits_are_those_of_the_definition(shape: tuple[int, ...]) -> None:
    spec = spec_of(*shape)
    values = torch.from_numpy(np.random.default_rng(0).standard_normal(shape)).to(torch.float32)
    found = rounded(values, spec)
    rows, columns = (1, shape[0]) if len(shape) == 1 else shape
    state = finalize((rounding_key(3, spec) + 5 * GAMMA) % WORD)
    for row in range(rows):
        for column in range(columns):
            word = finalize((state + (row * -(-columns // 4) + column // 4) * GAMMA) % WORD)
            lane = word >> (16 * (column % 4)) & 0xFFFF
            bits = int(values.view(torch.int32).view(rows, columns)[row, column]) % 2**32
            wanted = (bits + lane) % 2**32 >> 16
            assert int(found.view(torch.int16).view(rows, columns)[row, column]) % 2**16 == wanted


@pytest.mark.parametrize("columns", [16, 15])
def test_a_slice_is_rounded_as_in_the_whole(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setattr("lt_model.stochastic_rounding.CHUNK_NUMEL", 20)
    spec = spec_of(10, columns)
    values = torch.randn(10, columns, generator=torch.Generator().manual_seed(0))
    whole = rounded(values, spec)
    for rows, cut in ((slice(0, 10), slice(0, columns)), (slice(3, 7), slice(0, columns)), (slice(2, 9), slice(5, 12))):
        part = rounded(values[rows, cut], spec, offset=(rows.start, cut.start))
        assert torch.equal(part, whole[rows, cut])
    vector = spec_of(columns)
    assert torch.equal(rounded(values[0, 3:9], vector, offset=(3,)), rounded(values[0], vector)[3:9])


def test_means_are_unbiased_and_steps_seeds_and_names_differ() -> None:
    spec, lower, upper = spec_of(64, 1024), 1.0, 1.0 + 2**-7
    for share in (0.0, 0.1, 0.5, 0.9):
        for sign in (1.0, -1.0):
            value = sign * (lower + share * (upper - lower))
            found = rounded(torch.full((64, 1024), value), spec).double() * sign
            assert set(found.unique().tolist()) <= ({lower, upper} if share else {lower})
            assert float((found - lower).mean() / (upper - lower)) == pytest.approx(share, abs=0.01)  # 5 sigma
    values = torch.full((64, 1024), lower + 2**-8)
    streams = [rounded(values, spec), rounded(values, spec, step=6), rounded(values, spec, seed=4)]
    for i, one in enumerate(streams):
        for other in streams[:i]:
            assert float((one == other).double().mean()) == pytest.approx(0.5, abs=0.01)
    rows = (streams[0][:32] == streams[0][32:]).double().mean()
    assert float(rows) == pytest.approx(0.5, abs=0.02)


def test_what_bfloat16_has_stays() -> None:
    values = torch.tensor([0.0, -0.0, 1.5, -3.0, 2.0**-130, 3.3e38]).to(torch.bfloat16)
    assert torch.equal(rounded(values.float(), spec_of(6)).view(torch.int16), values.view(torch.int16))
