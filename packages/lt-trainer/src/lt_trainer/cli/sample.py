"""Text generation from a model on one device (`lt train sample`)."""

from __future__ import annotations

import os
from typing import Any

import torch

from lt_ckpt import CheckpointError
from lt_model import generate
from lt_trainer.evaluation.local_model import LoadedModel


def describe_model(loaded: LoadedModel) -> dict[str, Any]:
    """Return which model it is, and in which dtype and on which device it computes."""
    return {
        "model": os.path.realpath(loaded.source),
        "step": loaded.step,
        "weights": loaded.weights_sha256,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "device": loaded.device.type,
    }


def generate_text(
    loaded: LoadedModel, prompt: str, *, max_new_tokens: int, temperature: float, top_k: int, top_p: float, seed: int
) -> str:
    """Continue `prompt`; stop at the end-of-text id or at the model's context length.

    Returns:
        The continuation, without the prompt.

    Raises:
        CheckpointError: an empty prompt, or one that leaves no room in the model's context.
    """
    tokenizer = loaded.tokenizer
    ids = [int(i) for i in tokenizer.encode_batch([prompt])[0]]
    if tokenizer.bos_id is not None:
        ids = [tokenizer.bos_id, *ids]
    if not ids:
        raise CheckpointError("the prompt is empty and the tokenizer has no beginning-of-text id; pass a prompt")
    context_length = loaded.model.config.max_position_embeddings
    if len(ids) >= context_length:
        raise CheckpointError(
            f"the prompt has {len(ids)} tokens and {loaded.source} a context of {context_length}; "
            f"shorten it to at most {context_length - 1} tokens"
        )
    stops = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    with torch.no_grad():
        new_ids = generate(
            loaded.model,
            ids,
            max_new_tokens=min(max_new_tokens, context_length - len(ids)),
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop_token_ids=stops,
        )
    return tokenizer.decode([i for i in new_ids if i not in stops])
