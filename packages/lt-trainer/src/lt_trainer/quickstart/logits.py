"""The exported model in `transformers` against our own forward pass of the checkpoint: the logits must be the same.

Both run in float32 on the CPU; sums are taken in another order, so they differ in the last digits. The largest
difference is held against the largest logit: a swapped head or a wrong rotary angle is off by far more than the
tolerance.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from lt_trainer.quickstart.settings import Folder
from lt_trainer.quickstart.stages import Packed
from lt_trainer.sample import load

TOLERANCE = 1e-4
ROWS = 4


@dataclass(frozen=True, kw_only=True)
class LogitCheck:
    """How far two implementations are apart on the same tokens."""

    max_difference: float
    scale: float
    """The largest absolute logit."""
    tokens: int
    tolerance: float = TOLERANCE
    """The largest difference allowed, as a share of the largest logit."""

    @property
    def equal(self) -> bool:
        """Whether the difference is within the tolerance."""
        return self.max_difference <= self.tolerance * self.scale


def check_logits(folder: Folder, validation: Packed) -> LogitCheck:
    """Compare logits on the beginning of the longest validation documents, and the tokenizers on one of them."""
    transformers.utils.logging.disable_progress_bar()
    ours = load(folder.run)
    theirs = AutoModelForCausalLM.from_pretrained(folder.model, dtype=torch.float32, local_files_only=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder.model, local_files_only=True)
    store, seq_len = validation.store, validation.rows.seq_len
    longest = np.argsort(-store.lengths, kind="stable")[:ROWS]
    length = min(seq_len, int(store.lengths[longest].min()))
    ids = torch.tensor(np.stack([store.document(int(i))[:length] for i in longest]).astype(np.int64))
    text = ours.tokenizer.decode(ids[0].tolist(), skip_special=True)
    ours_ids = ours.tokenizer.encode_batch([text])[0].tolist()
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == ours_ids, (
        "the exported tokenizer encodes otherwise"
    )
    with torch.no_grad():
        a, b = ours.model(ids), theirs(input_ids=ids).logits
    return LogitCheck(max_difference=float((a - b).abs().max()), scale=float(a.abs().max()), tokens=ids.numel())
