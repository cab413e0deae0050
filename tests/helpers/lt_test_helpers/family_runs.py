"""Runs that begin with a model of transformers: their recipe, and the loss that transformers gives for their rows."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from family_models import NoFloat32

from lt_trainer.data.synthetic import SyntheticRows


def family_recipe(model: dict[str, str], out: Path, seq_len: int, **engine: Any) -> dict[str, Any]:
    """Return the recipe of three steps on synthetic rows.

    Args:
        model: The field that names a model.
        out: The run directory.
        seq_len: Tokens of a row.
        engine: The engine's section, by its name.
    """
    (name,) = engine
    return {
        "run": {"dir": str(out), "engine": name},
        "model": model,
        "data": {"synthetic": True, "seq_len": seq_len, "document_mask": False},
        "batch": {"global_batch_size": 2, "micro_batch_size": 1},
        "schedule": {"max_steps": 3, "warmup_steps": 0},
        "optimizer": {"lr": 1e-2},
        "checkpoint": {"interval": 1},
        "metrics": {"log_interval": 1},
        "engine": engine,
    }


@torch.no_grad()
def first_loss(theirs: transformers.PreTrainedModel, seq_len: int) -> float:
    """Return transformers' loss of a run's first two rows, in float64."""
    rows = SyntheticRows(vocab_size=theirs.config.vocab_size, seq_len=seq_len, seed=0).read_token_rows(np.arange(2))
    ids, last = (torch.from_numpy(part.astype(np.int64)) for part in (rows.input_ids, rows.next_ids))
    with NoFloat32():
        logits = theirs(input_ids=ids).logits.flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, torch.cat((ids[:, 1:], last[:, None]), dim=1).flatten()).item()
