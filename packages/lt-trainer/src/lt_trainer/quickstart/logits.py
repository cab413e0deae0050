"""Logit check: the exported model in `transformers` against lt's forward pass of the checkpoint.

Both run in float32 on the CPU; summation order differs, and with it the last digits. The largest difference is relative
to the largest logit: swapped heads or wrong rotary angles exceed the tolerance by far.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from lt_trainer.evaluation.local_model import load_model
from lt_trainer.quickstart.settings import QuickstartFolder
from lt_trainer.quickstart.stages import PackedStore

TOLERANCE = 1e-4
ROWS = 4


@dataclass(frozen=True, kw_only=True)
class LogitCheck:
    """Difference of two implementations on the same tokens."""

    max_difference: float
    scale: float
    """Largest absolute logit."""
    tokens: int
    tolerance: float = TOLERANCE
    """Allowed difference relative to `scale`."""

    @property
    def is_equal(self) -> bool:
        """True if the difference is within the tolerance."""
        return self.max_difference <= self.tolerance * self.scale


def check_logits(folder: QuickstartFolder, validation: PackedStore) -> LogitCheck:
    """Compare logits on prefixes of the longest validation documents, and the tokenizers on one of them."""
    transformers.utils.logging.disable_progress_bar()
    ours = load_model(folder.run)
    theirs = AutoModelForCausalLM.from_pretrained(folder.model, dtype=torch.float32, local_files_only=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder.model, local_files_only=True)
    store, seq_len = validation.store, validation.rows.seq_len
    longest = np.argsort(-store.lengths, kind="stable")[:ROWS]
    length = min(seq_len, int(store.lengths[longest].min()))
    ids = torch.tensor(np.stack([store.document(int(i))[:length] for i in longest]).astype(np.int64))
    text = ours.tokenizer.decode(ids[0].tolist(), skip_special_tokens=True)
    ours_ids = ours.tokenizer.encode_batch([text])[0].tolist()
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == ours_ids, "the exported tokenizer differs"
    with torch.no_grad():
        expected, exported = ours.model(ids), theirs(input_ids=ids).logits
    difference = float((expected - exported).abs().max())
    return LogitCheck(max_difference=difference, scale=float(expected.abs().max()), tokens=ids.numel())
