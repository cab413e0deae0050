import pytest

torch = pytest.importorskip("torch")

from plain_loss import cross_entropy_sum, linear_loss  # noqa: E402

from lt_model import IGNORE_INDEX  # noqa: E402
from lt_model.loss import linear_loss_parts  # noqa: E402
from lt_model.norm import RMSNorm, rms_norm, rms_norm_plus_one  # noqa: E402
from lt_model.swiglu import swiglu  # noqa: E402


def _inputs(n_tokens=23, width=6, vocab=11, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(n_tokens, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(vocab, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab, (n_tokens,), generator=generator)
    labels[::4] = IGNORE_INDEX
    return hidden, weight, labels


def test_sum_by_hand():
    logits = torch.tensor([[0.0, 0.0], [2.0, 0.0], [5.0, 1.0]])
    found = linear_loss(logits, torch.eye(2), torch.tensor([1, 0, IGNORE_INDEX], dtype=torch.int32))
    assert found.item() == pytest.approx(0.6931472 + 0.1269280, rel=1e-6)


@pytest.mark.parametrize("rows", [1, 5, 23, 256])
def test_chunked_loss_and_gradients_equal_the_plain_ones(monkeypatch, rows):
    monkeypatch.setattr("lt_model.loss.default_chunk_tokens", lambda *_: rows)
    monkeypatch.setattr("lt_model.loss._CPU_PART_TOKENS", 4)
    hidden, weight, labels = _inputs()
    # A factor after the loss must reach the gradients.
    plain = cross_entropy_sum(hidden @ weight.T, labels)
    expected = torch.autograd.grad(plain * 3.0, (hidden, weight))
    chunked = linear_loss(hidden, weight, labels)
    found = torch.autograd.grad(chunked * 3.0, (hidden, weight), retain_graph=True)
    torch.testing.assert_close(chunked, plain, rtol=1e-13, atol=0)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    again = torch.autograd.grad(chunked, (hidden, weight))
    torch.testing.assert_close([3.0 * grad for grad in again], list(expected), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_one_of_the_two_may_need_no_gradient(frozen):
    hidden, weight, labels = _inputs()
    expected = torch.autograd.grad(cross_entropy_sum(hidden @ weight.T, labels), (hidden, weight))
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    linear_loss(hidden, weight, labels).backward()
    found = weight.grad if frozen == "hidden" else hidden.grad
    torch.testing.assert_close(found, expected[frozen == "hidden"], rtol=1e-11, atol=1e-12)


def test_batched_shapes_and_no_grad():
    hidden, weight, labels = _inputs(n_tokens=24)
    expected = cross_entropy_sum(hidden @ weight.T, labels)
    with torch.no_grad():
        found = linear_loss(hidden.view(4, 6, -1), weight, labels.view(4, 6))
    assert not found.requires_grad
    torch.testing.assert_close(found, expected.detach(), rtol=1e-13, atol=0)


def test_large_logits_stay_finite_and_ignored_rows_give_no_gradient():
    hidden, weight, labels = _inputs(dtype=torch.float32)
    loss = linear_loss(hidden * 1e3, weight, labels)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(weight.grad).all()
    assert (hidden.grad[labels == IGNORE_INDEX] == 0).all()
    assert (hidden.grad[labels != IGNORE_INDEX] != 0).any()


def test_all_labels_ignored_is_zero_with_zero_gradients():
    hidden, weight, labels = _inputs()
    loss = linear_loss(hidden, weight, torch.full_like(labels, IGNORE_INDEX))
    loss.backward()
    assert loss.item() == 0
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_bfloat16_loss_is_fp32_of_bfloat16_logits():
    hidden, weight, labels = _inputs(dtype=torch.bfloat16)
    loss = linear_loss(hidden, weight, labels)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, cross_entropy_sum(hidden @ weight.T, labels), rtol=1e-6, atol=0)
    loss.backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16


def test_the_heads_gradient_is_summed_over_chunks_in_fp32(monkeypatch):
    """Each token adds an eighth to seven rows: in bfloat16 the sum would stay at 32, where half a step is more."""
    monkeypatch.setattr("lt_model.loss.default_chunk_tokens", lambda *_: 1)
    hidden = torch.ones(512, 2, dtype=torch.bfloat16)
    weight = torch.zeros(8, 2, dtype=torch.bfloat16, requires_grad=True)
    linear_loss(hidden, weight, torch.zeros(512, dtype=torch.long)).backward()
    assert weight.grad.tolist() == [[512 * (1 / 8 - 1)] * 2] + [[512 / 8] * 2] * 7


def test_one_chunk_needs_no_wide_sum_and_gives_the_same_bits():
    """With the second chunk's labels not counted, two chunks sum the same gradient in fp32."""
    hidden, weight, labels = _inputs(dtype=torch.bfloat16)
    none = torch.full_like(labels, IGNORE_INDEX)
    inputs = [(hidden, labels), (torch.cat([hidden, hidden]), torch.cat([labels, none]))]
    grads = []
    for hidden_ND, labels_N in inputs:
        loss = linear_loss_parts(hidden_ND, weight, labels_N, chunk_tokens=labels.numel()).total
        grads += torch.autograd.grad(loss, weight)
    assert torch.equal(*grads)
    assert grads[0].abs().max() > 0


@pytest.mark.parametrize("slab", [1, 3, 4, 11])
def test_slabs_of_the_heads_gradient_do_not_show(monkeypatch, slab):
    """A CPU widens the product of a narrow dtype some rows of the vocabulary at a time."""
    monkeypatch.setattr("lt_model.loss.default_chunk_tokens", lambda *_: 5)
    monkeypatch.setattr("lt_model.loss._CPU_CHUNK_ROWS", slab)
    hidden, weight, labels = _inputs(dtype=torch.bfloat16)
    linear_loss(hidden, weight, labels).backward()
    exact = weight.detach().float().requires_grad_()
    cross_entropy_sum(hidden.detach().float() @ exact.T, labels).backward()
    torch.testing.assert_close(weight.grad.float(), exact.grad, rtol=2e-2, atol=5e-2)
    assert exact.grad.abs().amax(dim=1).min() > 0.5, "a row in the wrong place would not show"


def test_rms_norm_gradients_are_right():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-3), (x, weight))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rms_norm_equals_the_function_used_on_other_devices(dtype):
    generator = torch.Generator().manual_seed(0)
    x = (10 * torch.randn(5, 4, 64, generator=generator)).to(dtype).requires_grad_()
    norm = RMSNorm(64, 1e-2).to(dtype)
    upstream = torch.randn(5, 4, 64, generator=generator).to(dtype)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5, generator=generator)
    expected_out = torch.nn.functional.rms_norm(x, (64,), norm.weight, 1e-2)
    expected = torch.autograd.grad(expected_out, (x, norm.weight), upstream)
    out = norm(x)
    found = torch.autograd.grad(out, (x, norm.weight), upstream)
    assert out.dtype == dtype
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close((out, *found), (expected_out, *expected), rtol=tolerance, atol=tolerance)


def test_what_a_compiler_is_given_is_the_same_function(monkeypatch):
    """Norm and SwiGLU have a formula of their own for compiled code; here that one runs uncompiled."""
    generator = torch.Generator().manual_seed(0)
    x, gate, up = (torch.randn(5, 8, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(3))
    weight = torch.randn(8, generator=generator, dtype=torch.float64).requires_grad_()
    upstream = torch.randn(5, 8, generator=generator, dtype=torch.float64)

    def results():
        outs = rms_norm(x, weight, 0.3), rms_norm_plus_one(x, weight, 0.3), swiglu(gate, up)
        return [*outs, *torch.autograd.grad(outs, (x, weight, gate, up), (upstream, upstream, upstream))]

    own = results()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    torch.testing.assert_close(results(), own, rtol=1e-12, atol=1e-13)
