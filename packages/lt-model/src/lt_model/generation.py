"""Text generation with a key/value cache.

The prompt goes through the model once; each further token goes through alone and attends to the cached keys and
values, so a token costs one forward pass of one position. Greedy output equals that of the uncached forward pass.

Prompts of different lengths share a batch without padding: what all have goes through at once, then token by token,
where a row takes its prompt's tokens until they end and its own afterwards. So rows of like lengths belong together. A
batch ends when all its rows have ended. Each row has a sampling generator of its own on the CPU, so its text neither
depends on the other rows' nor changes torch's global random state.

Cost: memory 2 * rows * n_layers * (longest prompt + new tokens) * n_kv_heads * head_dim numbers for the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from lt_model.decoder import Decoder, KVCache
from lt_model.errors import ModelError


def generate(
    model: Decoder,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop_token_ids: Collection[int] = (),
) -> list[int]:
    """Generate tokens that continue a prompt.

    Args:
        model: a materialized, unsharded model.
        prompt_ids: at least one token id.
        max_new_tokens: largest number of tokens to add.
        temperature: divides the logits before sampling; 0 takes the most likely token (the first of equals).
        top_k: sample among the k most likely tokens; 0 means all.
        top_p: sample among the fewest tokens whose probabilities reach top_p; 1 means all.
        seed: of the sampling generator.
        stop_token_ids: generation ends after any of these ids.

    Returns:
        The new ids, without the prompt; a stop id that was sampled is the last.

    Raises:
        ModelError: an empty prompt, an id outside the vocabulary, more positions than the model has, or an option
            outside its range.
    """
    (new_ids,) = generate_batch(
        model,
        [prompt_ids],
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seeds=[seed],
        is_finished=lambda row, new_ids: new_ids[-1] in stop_token_ids,
    )
    return new_ids


def generate_batch(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seeds: Sequence[int],
    is_finished: Callable[[int, list[int]], bool],
) -> list[list[int]]:
    """Generate tokens that continue each of several prompts, in one batch.

    Args:
        model: a materialized, unsharded model.
        prompts: one or more, of at least one token id each.
        max_new_tokens: largest number of tokens to add to each.
        temperature: as in `generate`; likewise top_k and top_p.
        top_k: see there.
        top_p: see there.
        seeds: of each row's sampling generator.
        is_finished: asked with a row and its new ids after each new one; True ends the row.

    Returns:
        The new ids of each row.

    Raises:
        ModelError: as in `generate`.
    """
    for prompt in prompts:
        _check_arguments(model, prompt, max_new_tokens, temperature, top_k, top_p)
    device = model.model.embed_tokens.weight.device
    samplers = [torch.Generator().manual_seed(seed) for seed in seeds]
    shortest, longest = min(map(len, prompts)), max(map(len, prompts))
    new_ids: list[list[int]] = [[] for _ in prompts]
    has_ended = [max_new_tokens == 0] * len(prompts)
    with torch.inference_mode():
        caches = [KVCache(longest + max_new_tokens) for _ in model.model.layers]
        pending = torch.tensor([list(prompt[:shortest]) for prompt in prompts], device=device)
        position = shortest  # of the next token in each row
        while not all(has_ended):
            last_BD = model.hidden_states(pending, caches=caches)[:, -1]
            sampled = [row for row, prompt in enumerate(prompts) if position >= len(prompt) and not has_ended[row]]
            logits_BV = model.logits(last_BD[sampled]).to("cpu", torch.float64)
            for row, logits_V in zip(sampled, logits_BV, strict=True):
                new_ids[row].append(_sample_token(logits_V, temperature, top_k, top_p, samplers[row]))
                has_ended[row] = len(new_ids[row]) == max_new_tokens or is_finished(row, new_ids[row])
            tokens = [
                [prompt[position] if position < len(prompt) else new[-1]]
                for prompt, new in zip(prompts, new_ids, strict=True)
            ]
            pending = torch.tensor(tokens, device=device)
            position += 1
    return new_ids


def _sample_token(logits_V: Tensor, temperature: float, top_k: int, top_p: float, sampler: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    # A stable sort keeps equal logits in the order of their ids on every machine.
    ordered, ids = logits_V.sort(descending=True, stable=True)
    ordered = ordered[: top_k or None] / temperature
    probabilities = ordered.softmax(dim=0)
    before = probabilities.cumsum(dim=0) - probabilities
    # The most likely token always stays: `before` is 0 there.
    probabilities = probabilities.masked_fill(before >= top_p, 0.0)
    return int(ids[torch.multinomial(probabilities, 1, generator=sampler)])


def _check_arguments(
    model: Decoder, prompt_ids: Sequence[int], max_new_tokens: int, temperature: float, top_k: int, top_p: float
) -> None:
    config = model.config
    if not prompt_ids:
        raise ModelError("the prompt is empty: give at least one token, such as the beginning-of-text id")
    for token_id in prompt_ids:
        if not 0 <= token_id < config.vocab_size:
            raise ModelError(f"prompt id {token_id} is outside the vocabulary of {config.vocab_size} ids")
    if max_new_tokens < 0:
        raise ModelError(f"max_new_tokens = {max_new_tokens}: must not be negative")
    if len(prompt_ids) + max_new_tokens > config.max_position_embeddings:
        raise ModelError(
            f"{len(prompt_ids)} prompt tokens and max_new_tokens = {max_new_tokens} exceed max_position_embeddings = "
            f"{config.max_position_embeddings}: ask for fewer tokens or shorten the prompt"
        )
    if not 0 <= temperature < float("inf"):
        raise ModelError(f"temperature = {temperature}: must be a finite number of at least 0")
    if top_k < 0:
        raise ModelError(f"top_k = {top_k}: must not be negative (0 means all)")
    if not 0 < top_p <= 1:
        raise ModelError(f"top_p = {top_p}: must be greater than 0 and at most 1")
