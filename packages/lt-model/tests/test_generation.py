import pytest

torch = pytest.importorskip("torch")

from lt_model import ModelError, generate, generate_batch  # noqa: E402

PROMPT = [3, 14, 15, 92, 65]


def _uncached_greedy(model, ids, n):
    ids = list(ids)
    with torch.no_grad():
        for _ in range(n):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids


@pytest.mark.parametrize("attention", ["sdpa", "reference"])
def test_greedy_equals_the_uncached_forward_pass(config, make_model, attention):
    model = make_model(config, attention=attention)
    expected = _uncached_greedy(model, PROMPT, 20)[len(PROMPT) :]
    assert len(set(expected)) > 3  # not one token again and again, or the test would see nothing
    assert generate(model, PROMPT, max_new_tokens=20, temperature=0) == expected
    assert generate(model, PROMPT, max_new_tokens=20, top_k=1) == expected
    assert generate(model, PROMPT, max_new_tokens=20, top_p=1e-9) == expected


def test_cached_logits_equal_uncached_ones_in_any_split(config, make_model):
    from lt_model.decoder import KVCache

    model = make_model(config)
    ids = torch.arange(12)[None] * 7 % config.vocab_size
    expected = model(ids)
    caches = [KVCache(12) for _ in range(config.n_layers)]
    with torch.no_grad():
        parts = [model.hidden_states(ids[:, a:b], caches=caches) for a, b in ((0, 5), (5, 6), (6, 10), (10, 12))]
    torch.testing.assert_close(model.lm_head(torch.cat(parts, dim=1)), expected, rtol=1e-11, atol=1e-11)


def test_it_ends_after_a_stop_id(gqa_config, make_model):
    model = make_model(gqa_config)
    full = generate(model, PROMPT, max_new_tokens=20, temperature=0)
    stop = full[6]
    assert (
        generate(model, PROMPT, max_new_tokens=20, temperature=0, stop_token_ids={stop}) == full[: full.index(stop) + 1]
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("lengths", [(5, 1, 3, 5), (4, 4), (2,)])
def test_a_row_of_a_batch_is_what_its_prompt_gives_alone(gqa_config, make_model, lengths, temperature):
    """Prompts of any lengths, rows that end before others, and a seed for each."""
    model = make_model(gqa_config)
    prompts = [[(7 * row + 11 * i) % gqa_config.vocab_size for i in range(n)] for row, n in enumerate(lengths)]
    ends = [3, 12, 7, 12][: len(prompts)]
    options = {"max_new_tokens": 12, "temperature": temperature}
    alone = [generate(model, prompt, seed=row, **options) for row, prompt in enumerate(prompts)]
    asked = []

    def is_finished(row, new_ids):
        asked.append((row, len(new_ids)))
        return len(new_ids) == ends[row]

    seeds = range(len(prompts))
    found = generate_batch(model, prompts, seeds=seeds, is_finished=is_finished, **options)
    assert found == [new_ids[:end] for new_ids, end in zip(alone, ends, strict=True)]
    assert sorted(asked) == [(row, n + 1) for row, end in enumerate(ends) for n in range(min(end, 11))]


def test_seeds_decide_and_leave_the_global_state_alone(gqa_config, make_model):
    model = make_model(gqa_config)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    runs = [generate(model, PROMPT, max_new_tokens=15, seed=seed) for seed in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]
    assert torch.equal(torch.get_rng_state(), state)
    assert generate(model, PROMPT, max_new_tokens=0) == []


def test_sampling_follows_the_filtered_distribution(gqa_config, make_model):
    model = make_model(gqa_config)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT]))[0, -1]
    probabilities = (logits / 2.0).softmax(dim=0)
    ordered = probabilities.sort(descending=True)
    n_runs = 400
    draws = torch.tensor(
        [generate(model, PROMPT, max_new_tokens=1, temperature=2.0, top_k=8, seed=s)[0] for s in range(n_runs)]
    )
    allowed = ordered.indices[:8]
    assert torch.isin(draws, allowed).all()
    expected = ordered.values[:8] / ordered.values[:8].sum()
    found = torch.stack([(draws == token).double().mean() for token in allowed])
    assert (found - expected).abs().max().item() < 4 * 0.5 / n_runs**0.5
    kept = int((ordered.values.cumsum(0) < 0.5).sum()) + 1
    few = {generate(model, PROMPT, max_new_tokens=1, temperature=2.0, top_p=0.5, seed=s)[0] for s in range(100)}
    assert few <= set(ordered.indices[:kept].tolist())
    assert len(few) > 1


def test_float32_and_bfloat16_models_generate(gqa_config, make_model):
    for dtype in (torch.float32, torch.bfloat16):
        assert len(generate(make_model(gqa_config, dtype=dtype), PROMPT, max_new_tokens=5)) == 5


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([101], {}, "prompt id 101 is outside the vocabulary of 101 ids"),
        (PROMPT, {"max_new_tokens": 60}, "exceed max_position_embeddings = 64"),
        (PROMPT, {"max_new_tokens": -1}, "max_new_tokens = -1"),
        (PROMPT, {"temperature": -0.5}, r"temperature = -0\.5"),
        (PROMPT, {"temperature": float("nan")}, "temperature = nan"),
        (PROMPT, {"top_k": -1}, "top_k = -1"),
        (PROMPT, {"top_p": 0.0}, r"top_p = 0\.0"),
    ],
)
def test_bad_options_are_named(gqa_config, make_model, prompt, options, message):
    with pytest.raises(ModelError, match=message):
        generate(make_model(gqa_config), prompt, **{"max_new_tokens": 4, **options})
