"""Every attention backend against the formula; who may run where; how the kernels of others are called."""

import ctypes
import sys
import types
from dataclasses import replace
from importlib.machinery import ModuleSpec

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from lt_model import PRESETS, Decoder, DocumentBoundaries, ModelError  # noqa: E402
from lt_model.attention import BACKENDS, attention_backend, available_backends, unavailable_reason  # noqa: E402
from lt_model.attention_features import ATTENTION_LACKS  # noqa: E402
from lt_model.decoder import DecoderBlock  # noqa: E402
from lt_model.documents import (  # noqa: E402
    SplitMask,
    flash_attn_attention,
    split_attention,
    torch_varlen_metadata,
    varlen_attention,
    varlen_metadata,
)
from lt_model.rope import rope_tables  # noqa: E402
from lt_model.sdpa import reference_attention, sdpa_attention  # noqa: E402

CPU = torch.device("cpu")
# Two rows of 12: three documents and padding; one document and padding at once.
ROWS = torch.tensor([[4] * 5 + [1] + [2] * 4 + [-1] * 2, [0] * 11 + [-1]])


def _heads(doc_ids, *, n_heads=6, n_kv_heads=2, width=8, dtype=torch.float64, device="cpu"):
    """Return q, k, v and an upstream gradient."""
    generator = torch.Generator().manual_seed(3)
    tensors = [
        torch.randn(*doc_ids.shape, heads, width, generator=generator, dtype=torch.float64).to(device, dtype)
        for heads in (n_heads, n_kv_heads, n_kv_heads, n_heads)
    ]
    return [tensor.requires_grad_() for tensor in tensors[:3]], tensors[3]


def _results(attend, mask, qkv, upstream):
    """Return output and gradients."""
    out = attend(*qkv, mask)
    return [out.detach(), *torch.autograd.grad(out, qkv, upstream)]


def _boundaries(doc_ids, *, padding=0):
    """Return the boundaries with some documents without a token at the end, as compiled blocks get them."""
    if doc_ids is None:
        return None
    boundaries = DocumentBoundaries.from_doc_ids(doc_ids)
    cu_seqlens = torch.cat((boundaries.cu_seqlens, boundaries.cu_seqlens[-1:].expand(padding)))
    return replace(boundaries, cu_seqlens=cu_seqlens)


def _expected(doc_ids, qkv, upstream):
    """Return what the formula gives, with the mask by its definition."""
    mask = None
    if doc_ids is not None:
        seen = (doc_ids[:, :, None] == doc_ids[:, None, :]).tril()[:, None].to(upstream.device)
        mask = torch.where(seen, 0.0, float("-inf")).to(upstream.dtype)
    return _results(reference_attention, mask, qkv, upstream)


@pytest.mark.parametrize("doc_ids", [ROWS, ROWS[:, :5], None], ids=["documents", "whole rows", "none"])
@pytest.mark.parametrize("kv_heads", [6, 2, 1])
@pytest.mark.parametrize("name", available_backends("cpu", torch.float64))
def test_every_backend_of_the_cpu_equals_the_formula(name, kv_heads, doc_ids):
    qkv, upstream = _heads(ROWS if doc_ids is None else doc_ids, n_kv_heads=kv_heads)
    backend = attention_backend(name, device="cpu", dtype=torch.float64)
    found, padded = (
        _results(backend.attend, backend.make_mask(_boundaries(doc_ids, padding=n), CPU, torch.float64), qkv, upstream)
        for n in (0, 7)
    )
    torch.testing.assert_close(found, _expected(doc_ids, qkv, upstream), rtol=1e-11, atol=1e-12)
    assert all(torch.equal(one, other) for one, other in zip(found, padded, strict=True))


@given(
    lengths=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=3),
    padding=st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_documents_are_found_where_they_lie(lengths, padding):
    width = max(map(sum, lengths))
    rows = [[i for i, n in enumerate(row) for _ in range(n)] + [-1] * (width - sum(row)) for row in lengths]
    ids = torch.tensor(rows, dtype=torch.int32)
    boundaries = _boundaries(ids, padding=padding)
    expected = [n for row in lengths for n in (*row, width - sum(row)) if n]
    assert boundaries.is_one_per_row == all(len(set(row)) == 1 for row in rows)
    assert boundaries.lengths() == expected
    assert boundaries.cu_seqlens[: len(expected) + 1].tolist() == [sum(expected[:i]) for i in range(len(expected) + 1)]
    assert (boundaries.cu_seqlens.dtype, boundaries.n_rows, boundaries.seq_len) == (torch.int32, len(rows), width)
    indices = boundaries.document_indices(CPU).flatten().tolist()
    assert indices == [i for i, n in enumerate(expected) for _ in range(n)]
    qkv, upstream = _heads(ids)
    backend = BACKENDS["split"]
    found = _results(backend.attend, backend.make_mask(boundaries, CPU, torch.float64), qkv, upstream)
    torch.testing.assert_close(found, _expected(ids, qkv, upstream), rtol=1e-11, atol=1e-12)


def test_a_document_that_comes_back_is_refused():
    with pytest.raises(ModelError, match="row 1 returns to a document that it has left"):
        DocumentBoundaries.from_doc_ids(torch.tensor([[0, 0, 1, 1], [0, 1, 0, 0]]))


def test_the_cpu_takes_documents_apart_by_default(gqa_config):
    model = Decoder(gqa_config)
    assert BACKENDS["auto"].make_mask(_boundaries(ROWS), CPU, torch.float32) == ([5, 1, 4, 2, 11, 1], 0)
    ids = torch.arange(24).view(2, 12)
    out = model(ids, doc_ids_BT=ROWS)
    reference = Decoder(gqa_config, attention="reference")
    reference.load_state_dict(model.state_dict())
    torch.testing.assert_close(out, reference(ids, doc_ids_BT=ROWS), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["cudnn", "flash", "varlen", "flex"])
def test_what_cannot_run_here_says_why_and_what_can(name, gqa_config):
    with pytest.raises(ModelError, match=rf"{name}' cannot run here: it runs on cuda, not on cpu; .* auto, reference"):
        attention_backend(name, device="cpu")
    if unavailable_reason(name, None, None):  # torch 2.9 has no varlen: said when the model is made
        with pytest.raises(ModelError, match="is not available"):
            Decoder(gqa_config, attention=name)
        return
    model = Decoder(gqa_config, attention=name)  # it may yet be moved to a device that can
    with pytest.raises(ModelError, match="it runs on cuda, not on cpu"):
        model(torch.arange(8)[None])


def test_dtypes_and_missing_modules_are_obstacles(monkeypatch):
    assert unavailable_reason("cudnn", "cuda", torch.float32) == "it takes bfloat16, float16, not float32"
    assert unavailable_reason("cudnn", "cuda", torch.bfloat16) is None
    monkeypatch.setattr("lt_model.attention.find_spec", lambda name: None)
    with pytest.raises(
        ModelError, match=r"flash_attn is not available .*: pip install flash-attn; those that can are auto"
    ):
        attention_backend("flash-attn")
    with pytest.raises(ModelError, match=r"torch.nn.attention.varlen is not available .*: it came with torch 2\.10"):
        attention_backend("varlen", device="cuda", dtype=torch.bfloat16)
    assert available_backends("cuda", torch.bfloat16) == [
        "auto",
        "reference",
        "sdpa",
        "cudnn",
        "flash",
        "split",
        "flex",
    ]


def test_flash_takes_whole_rows_only():
    flash = replace(BACKENDS["flash"], name="sdpa")  # which can run here
    assert flash.make_mask(_boundaries(ROWS[:, :5]), CPU, torch.bfloat16) is None
    with pytest.raises(ModelError, match="cannot keep the documents of a row apart"):
        flash.make_mask(_boundaries(ROWS), CPU, torch.bfloat16)


def _by_documents(q, k, v, bounds_q, bounds_k, longest_q, longest_k):
    """What a kernel for documents of any length computes, by the formula, on the CPU."""
    assert torch.equal(bounds_q, bounds_k)
    assert bounds_q.dtype == torch.int32
    sizes = bounds_q.diff()
    assert longest_q == longest_k >= sizes.max()
    parts = (x[None].split(sizes.tolist(), dim=1) for x in (q, k, v))
    return torch.cat([reference_attention(*part, None)[0] for part in zip(*parts, strict=True)])


def _varlen_2_10(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
    assert is_causal
    assert query.shape[1] == key.shape[1]
    return _by_documents(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k)


def _varlen_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
    assert tuple(window_size) == (-1, 0)
    assert query.shape[1] == key.shape[1]
    return _by_documents(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k)


def _varlen_2_13(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
):
    assert tuple(window_size) == (-1, 0)
    assert enable_gqa or query.shape[1] == key.shape[1]
    return _by_documents(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k)


@pytest.mark.parametrize("kernel", [_varlen_2_10, _varlen_2_11, _varlen_2_13])
def test_varlen_calls_each_version_of_the_kernel_rightly(monkeypatch, kernel):
    """The real kernel needs CUDA (see the test on the device); these have the signatures that torch has had."""
    module = types.ModuleType("torch.nn.attention.varlen")
    module.varlen_attn = kernel
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
    qkv, upstream = _heads(ROWS)
    metadata = torch_varlen_metadata(_boundaries(ROWS, padding=3), CPU)
    found = _results(varlen_attention, metadata, qkv, upstream)
    torch.testing.assert_close(found, _expected(ROWS, qkv, upstream), rtol=1e-11, atol=1e-12)


@pytest.mark.slow
def test_a_compiled_block_is_compiled_once_for_boundaries_of_one_length(monkeypatch, gqa_config):
    """With a stand-in for the kernel, which dynamo can trace: only the shapes of its arguments matter."""
    from torch._dynamo.testing import CompileCounter

    module = types.ModuleType("torch.nn.attention.varlen")
    module.varlen_attn = lambda q, k, v, cu_q, cu_k, max_q, max_k, *, window_size, enable_gqa: q * cu_q.sum()
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
    compiled = CompileCounter()
    block = DecoderBlock(gqa_config, varlen_attention, gqa_config.layer(0))
    block.forward = torch.compile(block.forward, fullgraph=True, backend=compiled)
    x, rope = (
        torch.randn(2, 12, gqa_config.hidden_size),
        rope_tables(gqa_config.rope(0), torch.arange(12), torch.float32),
    )
    for n_documents in (1, 2, 3, 4):
        doc_ids = (torch.arange(12) * n_documents // 12).expand(2, -1)
        boundaries = _boundaries(doc_ids, padding=2 * (4 - n_documents))
        assert len(boundaries.cu_seqlens) == 9
        block(x, rope, torch_varlen_metadata(boundaries, CPU)).sum().backward()
    assert compiled.frame_count == 1


@pytest.mark.parametrize("doc_ids", [ROWS, None], ids=["documents", "none"])
def test_flash_attn_is_called_rightly(monkeypatch, doc_ids):
    def flash_attn_func(q, k, v, *, causal=False):
        assert causal
        return sdpa_attention(q, k, v, None)

    def flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, *, causal=False):
        assert causal
        return _by_documents(q, k, v, cu_q, cu_k, max_q, max_k)

    module = types.ModuleType("flash_attn")
    module.__spec__ = ModuleSpec("flash_attn", None)
    module.flash_attn_func, module.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    assert unavailable_reason("flash-attn", "cuda", torch.bfloat16) is None
    qkv, upstream = _heads(ROWS)
    metadata = None if doc_ids is None else varlen_metadata(_boundaries(doc_ids, padding=3), CPU)
    found = _results(flash_attn_attention, metadata, qkv, upstream)
    torch.testing.assert_close(found, _expected(doc_ids, qkv, upstream), rtol=1e-11, atol=1e-12)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
def test_flex_sees_what_the_formula_sees():
    """Forward only and not compiled: the CPU has no more of it."""
    from torch.nn.attention.flex_attention import flex_attention

    from lt_model.flex import call_flex, flex_mask

    q, k, v = (tensor.detach() for tensor in _heads(ROWS, dtype=torch.float32)[0])
    with torch.no_grad():
        found = call_flex(flex_attention, q, k, v, flex_mask(_boundaries(ROWS, padding=3), CPU))
        bias = BACKENDS["reference"].make_mask(_boundaries(ROWS), CPU, torch.float32)
        torch.testing.assert_close(found, reference_attention(q, k, v, bias), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
def test_a_sink_takes_its_share_of_the_softmax():
    """A key of its own for each head, with the value 0; flex has it from the log-sum-exp, with windows and caps."""
    from torch.nn.attention.flex_attention import flex_attention

    from lt_model.flex import call_flex, flex_mask, flex_mask_attention

    q, k, v = (tensor.detach() for tensor in _heads(ROWS, n_kv_heads=6)[0])
    sinks = torch.linspace(-2, 5, 6, dtype=torch.float64)
    scores = torch.einsum("bthk,bshk->bhts", q, k) / 8**0.5
    scores = scores.masked_fill(torch.ones(12, 12).triu(1).bool(), float("-inf")).exp()
    wanted = torch.einsum("bhts,bshk->bthk", scores / (scores.sum(-1, keepdim=True) + sinks.exp()[:, None, None]), v)
    torch.testing.assert_close(reference_attention(q, k, v, None, sinks=sinks), wanted)
    torch.testing.assert_close(flex_mask_attention(q, k, v, None, sinks=sinks), wanted)
    torch.testing.assert_close(BACKENDS["auto"].attend(q, k, v, None, sinks=sinks), wanted)
    bias = BACKENDS["reference"].make_mask(_boundaries(ROWS), CPU, torch.float32, 3)
    for cap in (0.0, 0.7):
        wanted = reference_attention(q.float(), k.float(), v.float(), bias, cap, sinks)
        with torch.no_grad():
            found = call_flex(
                flex_attention, q.float(), k.float(), v.float(), flex_mask(_boundaries(ROWS), CPU, 3), cap, sinks
            )
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_backends_without_sinks_are_refused_by_name():
    config = replace(PRESETS["gpt-oss-20b"], n_layers=2, hidden_size=64, intermediate_size=8, expert_size=8)
    assert ATTENTION_LACKS.keys() == BACKENDS.keys()
    for name, lacks in ATTENTION_LACKS.items():
        if "sinks" not in lacks:
            assert BACKENDS[name].for_model(config).always_masks == (name != "reference")
            continue
        with pytest.raises(ModelError, match=rf"= .* by attention = '{name}' \(take auto, reference, .*flex"):
            BACKENDS[name].for_model(config)


@pytest.mark.gpu
@pytest.mark.parametrize("documents", [True, False])
@pytest.mark.parametrize("name", sorted(set(BACKENDS) - {"reference"}))
def test_every_backend_of_the_device_equals_the_formula(name, documents):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if why := unavailable_reason(name, "cuda", torch.bfloat16):
        pytest.skip(f"{name}: {why}")
    if name == "flash" and documents:
        pytest.skip("flash takes whole rows only")
    doc_ids = ROWS.repeat_interleave(32, dim=1) if documents else None
    boundaries = _boundaries(doc_ids, padding=5)
    qkv, upstream = _heads(ROWS.repeat_interleave(32, dim=1), width=64, dtype=torch.bfloat16, device="cuda")
    backend = BACKENDS[name]
    found = _results(backend.attend, backend.make_mask(boundaries, upstream.device, torch.bfloat16), qkv, upstream)
    wide = [tensor.detach().double().requires_grad_() for tensor in qkv]
    for one, other in zip(found, _expected(doc_ids, wide, upstream.double()), strict=True):
        assert ((one.double() - other).norm() / other.norm()).item() < 2e-2


class _Malloc(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def _malloc_bytes() -> int:
    """Return what this process has allocated and not freed."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("this libc does not say how much memory is in use")
    libc.mallinfo2.restype = _Malloc
    info = libc.mallinfo2()
    return info.uordblks + info.hblkhd


def test_documents_of_every_length_need_few_kernels():
    """torch keeps those of the backward pass in bfloat16: 600 MB of 256 lengths, where each is computed as it is."""
    torch.manual_seed(0)

    def attend(lengths: list[int]) -> None:
        qkv = [torch.randn(1, sum(lengths), n, 32, dtype=torch.bfloat16, requires_grad=True) for n in (4, 2, 2)]
        out = split_attention(*qkv, SplitMask(lengths, 0))
        out.backward(out.detach())

    attend([1, 256])
    before = _malloc_bytes()
    for first in range(1, 257, 8):
        attend(list(range(first, first + 8)))
    assert _malloc_bytes() - before < 60e6


@pytest.mark.parametrize("window", [0, 10, 50])
def test_lengths_that_are_rounded_up_change_nothing_but_the_last_bits(window):
    lengths = [1, 5, 31, 32, 33, 70]
    ids = torch.tensor([[i for i, length in enumerate(lengths) for _ in range(length)]])
    qkv, upstream = _heads(ids)
    qkv, upstream = [x.bfloat16() for x in qkv], upstream.bfloat16()
    mask = SplitMask(lengths, window)
    found = _results(split_attention, mask, qkv, upstream)
    exact = _results(split_attention, mask, [x.double() for x in qkv], upstream.double())
    for narrow, wide in zip(found, exact, strict=True):
        assert (narrow.double() - wide).norm() < 0.006 * wide.norm()
