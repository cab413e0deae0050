"""Documents packed into one row give the numbers that each gives alone."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from lt_model import Decoder, DocumentBoundaries, ModelError  # noqa: E402
from lt_model.attention import BACKENDS, available_backends, document_bias  # noqa: E402
from lt_model.documents import SplitMask  # noqa: E402

LENGTHS = ((7, 12, 5), (24,), (1, 22, 1), (11, 4))  # the last row ends in 9 positions of padding
N_TOKENS = 24


def _packed_rows(vocab_size):
    """Return ids, labels, positions, doc ids of packed rows, and (row, first, end) of each document."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.zeros(len(LENGTHS), N_TOKENS, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    positions, doc_ids = torch.zeros_like(ids), torch.full_like(ids, -1)
    documents = []
    for row, lengths in enumerate(LENGTHS):
        first = 0
        for number, length in enumerate(lengths):
            end = first + length
            ids[row, first:end] = torch.randint(1, vocab_size, (length,), generator=generator)
            labels[row, first : end - 1] = ids[row, first + 1 : end]
            positions[row, first:end] = torch.arange(length)
            doc_ids[row, first:end] = number
            documents.append((row, first, end))
            first = end
    return ids, labels, positions, doc_ids, documents


@pytest.mark.parametrize("attention", available_backends("cpu", torch.float64))
def test_packed_equals_each_document_alone(config, make_model, attention):
    model = make_model(config, attention=attention)
    ids, labels, positions, doc_ids, documents = _packed_rows(config.vocab_size)
    logits = model(ids, position_ids_BT=positions, doc_ids_BT=doc_ids)
    loss = model(ids, position_ids_BT=positions, doc_ids_BT=doc_ids, labels_BT=labels)
    loss.backward()
    packed = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    alone = torch.zeros((), dtype=torch.float64)
    for row, first, end in documents:
        torch.testing.assert_close(
            logits[row, first:end], model(ids[row : row + 1, first:end])[0], rtol=1e-11, atol=1e-11
        )
        part = model(ids[row : row + 1, first:end], labels_BT=labels[row : row + 1, first:end])
        part.backward()
        alone += part.detach()
    assert loss.item() == pytest.approx(alone.item(), rel=1e-12)
    for name, parameter in model.named_parameters():
        scale = parameter.grad.abs().max()
        assert ((packed[name] - parameter.grad).abs().max() / scale).item() < 1e-11, name


def test_backends_agree_in_outputs_and_gradients(gqa_config, make_model):
    ids, labels, positions, doc_ids, _ = _packed_rows(gqa_config.vocab_size)
    gradients = []
    for attention in ("reference", "sdpa", "split", "auto"):
        model = make_model(gqa_config, attention=attention)
        model(ids, position_ids_BT=positions, doc_ids_BT=doc_ids, labels_BT=labels).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for one, *others in zip(*gradients, strict=True):
        for other in others:
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


def test_no_position_sees_a_later_one_or_another_document(gqa_config, make_model):
    model = make_model(gqa_config)
    ids, _, positions, doc_ids, documents = _packed_rows(gqa_config.vocab_size)
    before = model(ids, position_ids_BT=positions, doc_ids_BT=doc_ids)
    row, first, end = documents[1]
    changed = ids.clone()
    middle = first + 4
    changed[row, middle] = (changed[row, middle] + 1) % gqa_config.vocab_size
    after = model(changed, position_ids_BT=positions, doc_ids_BT=doc_ids)
    differs = (before != after).any(dim=-1)
    expected = torch.zeros_like(differs)
    expected[row, middle:end] = True
    assert torch.equal(differs, expected)


@given(rows=st.lists(st.lists(st.integers(-1, 3), min_size=6, max_size=6).map(sorted), min_size=1, max_size=3))
@settings(max_examples=100, deadline=None)
def test_bias_by_definition(rows):
    bias = document_bias(DocumentBoundaries.from_doc_ids(torch.tensor(rows)), torch.device("cpu"), torch.float32)
    for row, documents in enumerate(rows):
        for query in range(6):
            for key in range(6):
                seen = key <= query and documents[query] == documents[key]
                assert bias[row, 0, query, key].item() == (0.0 if seen else float("-inf"))


def test_without_document_ids_everything_earlier_is_seen(gqa_config, make_model):
    model = make_model(gqa_config)
    ids = torch.arange(10)[None]
    same = model(ids, doc_ids_BT=torch.full_like(ids, 3))
    assert torch.equal(model(ids), same)


def test_unknown_backend_is_named(gqa_config):
    with pytest.raises(ModelError, match="attention = 'fash': unknown; the backends are auto, reference, sdpa"):
        Decoder(gqa_config, attention="fash")


def test_int32_inputs_give_the_same_bits(gqa_config, make_model):
    """The stream delivers int32 arrays."""
    model = make_model(gqa_config)
    ids, labels, positions, doc_ids, _ = _packed_rows(gqa_config.vocab_size)
    results = []
    for dtype in (torch.int64, torch.int32):
        model.zero_grad()
        batch = [tensor.to(dtype) for tensor in (ids, positions, doc_ids, labels)]
        loss = model(batch[0], position_ids_BT=batch[1], doc_ids_BT=batch[2], labels_BT=batch[3])
        loss.backward()
        results.append([loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_auto_has_blocks_for_a_window_on_cuda(dtype):
    """Where the kernel of any lengths does not take the dtype; a square of T x T would be the row's whole memory."""
    boundaries = DocumentBoundaries.one_per_row(2, 40)
    assert BACKENDS["auto"].mask_factory(boundaries, torch.device("cuda"), dtype, 5) == SplitMask([40, 40], 5)
