"""What compilers see of the loss, norms, rotation and SwiGLU equals eager code; attention compiles with any length."""

import pytest

torch = pytest.importorskip("torch")

from lt_model.loss import linear_loss_parts  # noqa: E402
from lt_model.norm import rms_norm, rms_norm_plus_one  # noqa: E402
from lt_model.rope import apply_rope  # noqa: E402
from lt_model.sdpa import sdpa_attention  # noqa: E402
from lt_model.swiglu import swiglu  # noqa: E402

VOCAB, WIDTH, TOKENS = 61, 16, 23
CHUNK_TOKENS = 8
"""So there are chunks of 8, 8 and 7 tokens."""
SHARDED = 40
"""Rows of the head on the first of two ranks."""


def head_of(dtype):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype)
    weight = torch.randn(VOCAB, WIDTH, generator=generator).to(dtype)
    labels = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    labels[::4] = -100
    return hidden, weight, labels


def loss_and_gradients(dtype, z_loss, multiple, *, compile, sharded=False):
    """Loss with z-loss, and the gradients; sharded: of the rank with the first rows of the head."""
    hidden, weight, labels = head_of(dtype)
    reduce = None
    if sharded:
        wide = (hidden @ weight[SHARDED:].T).to(torch.promote_types(dtype, torch.float32))

        def reduce(top, exp_sum, at_label):
            rows = next(slice(i, i + len(top)) for i in chunks)
            theirs = wide[rows]
            other = (labels[rows] - SHARDED).clamp(0)[:, None]
            at_label = at_label + theirs.gather(1, other) * (labels[rows] >= SHARDED)[:, None]
            both = torch.maximum(top, theirs.amax(dim=1, keepdim=True))
            return both, exp_sum * (top - both).exp() + (theirs - both).exp().sum(dim=1, keepdim=True), at_label

        chunks = iter(range(0, TOKENS, CHUNK_TOKENS))
        weight = weight[:SHARDED]
    hidden, weight = hidden.requires_grad_(), weight.clone().requires_grad_()
    parts = linear_loss_parts(
        hidden,
        weight,
        labels,
        z_loss=z_loss,
        pad_to_multiple_of=multiple,
        all_reduce_softmax=reduce,
        chunk_tokens=CHUNK_TOKENS,
        compile=compile,
    )
    return [*(part.detach() for part in parts), *torch.autograd.grad(parts.total, (hidden, weight))]


CASES = [(0.0, 1, False), (1e-2, 16, False), (1e-2, 16, True)]


@pytest.mark.parametrize(("z_loss", "multiple", "sharded"), CASES)
def test_the_functions_to_compile_are_the_loss(monkeypatch, z_loss, multiple, sharded):
    monkeypatch.setattr("lt_model.loss.compiled", lambda function: function)
    expected = loss_and_gradients(torch.float64, z_loss, multiple, compile=False, sharded=sharded)
    found = loss_and_gradients(torch.float64, z_loss, multiple, compile=True, sharded=sharded)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(("z_loss", "multiple", "sharded"), CASES)
def test_the_compiled_loss_is_the_eager_one(dtype, near, z_loss, multiple, sharded):
    expected = loss_and_gradients(dtype, z_loss, multiple, compile=False, sharded=sharded)
    found = loss_and_gradients(dtype, z_loss, multiple, compile=True, sharded=sharded)
    torch.testing.assert_close(found, expected, rtol=near, atol=near)


def test_attention_compiles_with_rows_of_several_lengths():
    attend = torch.compile(sdpa_attention, fullgraph=True, backend="eager")
    for n_tokens in (16, 24, 8, 40):
        q, k = torch.randn(2, n_tokens, 4, 8), torch.randn(2, n_tokens, 2, 8)
        torch.testing.assert_close(attend(q, k, k, None), sdpa_attention(q, k, k, None))


def test_the_formulas_for_compilers_are_those_of_eager_code():
    """Partial rotation, an epsilon that shows, and the gradients of both arguments."""
    wide = {"dtype": torch.float64}
    x, other, weight = (torch.randn(2, 5, 3, 8, **wide), torch.randn(2, 5, 3, 8, **wide), torch.randn(8, **wide))
    cos, sin = torch.randn(2, 5, 1, 3, **wide).chunk(2)
    for function, *given in (
        (lambda x, y: apply_rope(x, (cos, sin)) * y, x, other),
        (lambda x, w: rms_norm(x, w, 0.3), x, weight),
        (lambda x, w: rms_norm_plus_one(x, w, 0.3), x, weight),
        (swiglu, x, other),
    ):
        found = []
        for call in (function, torch.compile(function, fullgraph=True, backend="eager")):
            arguments = [one.clone().requires_grad_() for one in given]
            y = call(*arguments)
            y.backward(torch.linspace(-1, 2, y.numel(), **wide).view_as(y))
            found.append([y, *(one.grad for one in arguments)])
        torch.testing.assert_close(*found, rtol=1e-12, atol=1e-13)
