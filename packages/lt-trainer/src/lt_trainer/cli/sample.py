"""Text generation from a model on one device (`lt train sample`)."""

from __future__ import annotations

from typing import Any

from lt_ckpt import CheckpointError
from lt_trainer.evaluation.local_model import LoadedModel


def generate_text(loaded: LoadedModel, prompt: str, *, max_new_tokens: int, **options: Any) -> str:
    """Continue `prompt`; stop at the end-of-text id or at the model's context length.

    Args:
        loaded: The model.
        prompt: The text to continue.
        max_new_tokens: Largest number of tokens to add.
        options: temperature, top_k, top_p and seed of `lt_model.generate`.

    Returns:
        The continuation, without the prompt.

    Raises:
        CheckpointError: an empty prompt, or one that leaves no room in the model's context.
    """
    from lt_model import generate

    tokenizer = loaded.tokenizer
    ids = [int(i) for i in tokenizer.encode_batch([prompt])[0]]
    if tokenizer.bos_id is not None:
        ids = [tokenizer.bos_id, *ids]
    if not ids:
        raise CheckpointError("the prompt is empty and the tokenizer has no beginning-of-text id; pass a prompt")
    room = loaded.model.config.max_position_embeddings - len(ids)
    if room < 1:
        raise CheckpointError(
            f"the prompt leaves no room in the context of {loaded.source}: shorten it to at most "
            f"{len(ids) + room - 1} tokens, from {len(ids)}"
        )
    stops = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    new_ids = generate(loaded.model, ids, max_new_tokens=min(max_new_tokens, room), stop_token_ids=stops, **options)
    return tokenizer.decode([i for i in new_ids if i not in stops])
