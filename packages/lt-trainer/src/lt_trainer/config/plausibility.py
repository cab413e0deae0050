"""Warnings about values that are allowed and hardly ever meant: one line each, never a refusal."""

from lt_trainer.config.sections import Recipe

MAX_USUAL_LR = 0.1
"""AdamW trains with 1e-5 to 1e-2, Muon with up to 0.05."""
MAX_USUAL_EPOCHS = 100
"""Beyond about 40 epochs, repeated data teaches nothing (Muennighoff and others, https://arxiv.org/abs/2305.16264)."""


def recipe_warnings(recipe: Recipe, store_tokens: int) -> list[str]:
    """Return the warnings about a recipe.

    Args:
        recipe: Recipe.
        store_tokens: Tokens in `data.store`; 0 if there is no single store, or it is not here.
    """
    warnings, lr, steps = list[str](), recipe.optimizer.lr, recipe.schedule.max_steps
    if lr > MAX_USUAL_LR:
        warnings.append(f"warning: optimizer.lr = {lr:g} is far above usual learning rates, 1e-5 to 1e-2")
    tokens = steps * recipe.batch.global_batch_size * recipe.data.seq_len
    if store_tokens and tokens > MAX_USUAL_EPOCHS * store_tokens:
        warnings.append(
            f"warning: schedule.max_steps = {steps:,} reads {tokens:,} tokens, which are {tokens / store_tokens:,.0f} "
            f'epochs of the {store_tokens:,} in data.store; "3 epochs" sets their number'
        )
    return warnings
