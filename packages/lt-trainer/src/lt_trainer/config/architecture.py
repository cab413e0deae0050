"""Architecture of a run that starts from a pretrained model, read from its config or a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lt_ckpt import Checkpoint, CheckpointError, list_steps, load_model_config
from lt_model import LlamaConfig, ModelError, config_from_hf
from lt_trainer.errors import RecipeError


def read_architecture(options: Mapping[str, Any], out: Path, resume: bool) -> tuple[LlamaConfig, str]:
    """Read the architecture for a recipe with `model.init_from`.

    Args:
        options: Values of `[model]` that were given, by field name.
        out: Run directory.
        resume: The run would resume from a checkpoint there.

    Returns:
        The architecture, and where it was read.

    Raises:
        RecipeError: the model does not exist, or is not a Llama.
    """
    if resume:
        for _, path in list_steps(out / "checkpoints"):  # newest first
            try:
                return LlamaConfig.from_dict(Checkpoint.open(path).manifest.model), str(path)
            except CheckpointError:
                continue  # damaged: resuming reports it and uses an older one
    address = options["init_from"]
    with as_recipe_error(address):
        return config_from_hf(dict(load_model_config(address, config=options.get("init_config") or None))), address


@contextmanager
def as_recipe_error(address: str) -> Iterator[None]:
    """Translate errors of lt-ckpt and lt-model into RecipeErrors of `model.init_from`."""
    try:
        yield
    except (CheckpointError, ModelError) as exc:
        raise RecipeError(str(exc), values={"model.init_from": address}) from exc
