"""Token ids of a context and its continuation, in the way of lm-evaluation-harness.

Both are encoded together, so that the boundary has the tokens that it has in running text; spaces at the end of the
context belong to the continuation. The special tokens are those that the tokenizer itself adds. An empty context is the
beginning-of-text id, or without one the end-of-text id.
"""

from __future__ import annotations

import tokenizers

from lt_data import Tokenizer
from lt_trainer.evaluation.requests import ScoreRequest
from lt_trainer.evaluation.scorer import EvaluationError


class PairEncoder:
    """Encoder of contexts and continuations.

    Args:
        tokenizer: the model's.

    Raises:
        EvaluationError: it has neither a beginning- nor an end-of-text id.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._encoder = tokenizers.Tokenizer.from_buffer(tokenizer.files["tokenizer.json"])
        self._encoder.no_padding()
        self._encoder.no_truncation()
        prefix_id = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
        if prefix_id is None:
            raise EvaluationError(
                "the tokenizer has neither a beginning- nor an end-of-text token, which begins a text without context; "
                "name one in its tokenizer_config.json"
            )
        self.prefix_id = prefix_id

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text."""
        return self._encoder.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids."""
        return self._encoder.decode(ids, skip_special_tokens=skip_special_tokens)

    def request(self, context: str, continuation: str) -> ScoreRequest:
        """Return the request for the score of a continuation after a context."""
        if not context:
            ids = self.encode(continuation, add_special_tokens=False)
            if ids[:1] == [self.prefix_id]:
                return ScoreRequest(context=tuple(ids[:1]), continuation=tuple(ids[1:]))
            return ScoreRequest(context=(self.prefix_id,), continuation=tuple(ids))
        stripped = context.rstrip()
        continuation = context[len(stripped) :] + continuation
        context_ids, ids = self.encode(stripped), self.encode(stripped + continuation)
        return ScoreRequest(context=tuple(context_ids), continuation=tuple(ids[len(context_ids) :]))
