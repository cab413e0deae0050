"""Evaluation: scores of labels, perplexity by source and length, and tasks."""

from typing import TYPE_CHECKING

from lt_trainer.lazy import lazy_exports

if TYPE_CHECKING:
    from lt_trainer.evaluation.position_scores import PositionScores as PositionScores
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "position_scores": "PositionScores",
        },
    )
