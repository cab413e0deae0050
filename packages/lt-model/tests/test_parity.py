"""Our Llama against transformers' LlamaForCausalLM in float64: logits, loss, every gradient.

transformers computes norms, rotary angles and the softmax in float32 whatever the weights are, which hides everything
below 1e-7. Its code runs here under a mode that turns each cast to float32 into one to float64; nothing else about it
is changed. A second test runs it untouched in fp32.
"""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch.overrides import TorchFunctionMode  # noqa: E402

from lt_model import Decoder, config_to_hf, linear_label_scores, param_specs  # noqa: E402

N_ROWS, N_TOKENS = 3, 40
TOLERANCE = 1e-10


class _NoFloat32(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _hugging_face(model):
    """Return the LlamaForCausalLM with our model's config and weights."""
    values = config_to_hf(model.config, dtype="float64")
    config = transformers.LlamaConfig.from_dict(values)
    config._attn_implementation = "eager"
    other = transformers.LlamaForCausalLM(config).to(next(model.parameters()).dtype)
    assert set(other.state_dict()) == set(model.state_dict())
    other.load_state_dict(model.state_dict(), strict=True)
    return other.eval()


def _batch(config):
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, config.vocab_size, (N_ROWS, N_TOKENS), generator=generator)
    labels = torch.randint(0, config.vocab_size, (N_ROWS, N_TOKENS), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.2] = -100
    positions = torch.stack([torch.arange(N_TOKENS) + 5 * row for row in range(N_ROWS)])
    return ids, labels, positions


def _relative(ours, theirs):
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def _loss_and_gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("attention", ["sdpa", "reference"])
def test_logits_loss_and_every_gradient_match_in_float64(config, make_model, attention):
    ours = make_model(config, attention=attention)
    ids, labels, positions = _batch(config)
    with _NoFloat32():
        theirs = _hugging_face(ours)
        logits = theirs(input_ids=ids, position_ids=positions, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    assert logits.dtype == torch.float64
    assert _relative(ours(ids, position_ids_BT=positions), logits) < TOLERANCE
    our_loss = ours(ids, position_ids_BT=positions, labels_BT=labels)
    assert our_loss.dtype == torch.float64
    assert abs(our_loss.item() / loss.item() - 1) < TOLERANCE
    expected = _loss_and_gradients(theirs, loss)
    found = _loss_and_gradients(ours, our_loss)
    assert list(found) == [parameter.name for parameter in param_specs(config)]
    assert set(found) == set(expected)
    worst = {name: _relative(found[name], expected[name]) for name in expected}
    assert max(worst.values()) < TOLERANCE, worst


def test_default_positions_match_untouched_transformers_in_fp32(config, make_model):
    ours = make_model(config, dtype=torch.float32)
    ids, labels, _ = _batch(config)
    theirs = _hugging_face(ours)
    logits = theirs(input_ids=ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    assert _relative(ours(ids), logits) < 3e-6
    our_loss = ours(ids, labels_BT=labels)
    assert our_loss.dtype == torch.float32
    assert abs(our_loss.item() / loss.item() - 1) < 1e-6
    expected, found = _loss_and_gradients(theirs, loss), _loss_and_gradients(ours, our_loss)
    worst = {name: _relative(found[name], expected[name]) for name in expected}
    assert max(worst.values()) < 2e-5, worst


def test_label_scores_match_transformers_position_by_position_in_fp32(config, make_model):
    ours = make_model(config, dtype=torch.float32)
    ids, labels, _ = _batch(config)
    with torch.no_grad():
        log_probs = _hugging_face(ours)(input_ids=ids, use_cache=False).logits.log_softmax(dim=-1)
        labels[:, ::5] = log_probs.argmax(dim=-1)[:, ::5]
        expected = log_probs.gather(-1, labels.clamp(min=0)[..., None])[..., 0].masked_fill(labels == -100, 0)
        found = linear_label_scores(ours.hidden_states(ids), ours.lm_head.weight, labels)
    assert (found.log_probs - expected).abs().max() < 1e-4
    assert found.is_greedy.tolist() == (log_probs.argmax(dim=-1) == labels).tolist()
    assert found.is_greedy[:, ::5].all()


def test_rotary_angles_are_bit_equal_to_transformers(config):
    from lt_model.rope import inverse_frequencies

    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(config_to_hf(config)))
    assert torch.equal(inverse_frequencies(config.rope(0)), theirs.model.rotary_emb.inv_freq)


def test_bfloat16_is_close_to_fp32(gqa_config, make_model):
    ids, labels, _ = _batch(gqa_config)
    wide, narrow = make_model(gqa_config, dtype=torch.float32), make_model(gqa_config, dtype=torch.bfloat16)
    loss = narrow(ids, labels_BT=labels)
    assert narrow(ids).dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    assert abs(loss.item() / wide(ids, labels_BT=labels).item() - 1) < 0.05
    loss.backward()
    assert all(parameter.grad.dtype == torch.bfloat16 for parameter in narrow.parameters())


def test_names_shapes_and_order_are_those_of_the_parameter_table(config):
    with torch.device("meta"):
        model = Decoder(config)
    found = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    assert found == [(parameter.name, parameter.shape) for parameter in param_specs(config)]
    assert model(torch.empty(2, 5, dtype=torch.long, device="meta")).shape == (2, 5, config.vocab_size)
