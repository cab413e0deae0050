"""Evaluation: scores of labels, losses over stores by source and length, and tasks."""

from typing import TYPE_CHECKING

from lt_trainer.lazy import lazy_exports

if TYPE_CHECKING:
    from lt_trainer.evaluation.local_model import LoadedModel as LoadedModel
    from lt_trainer.evaluation.local_model import load_model as load_model
    from lt_trainer.evaluation.position_scores import PositionScores as PositionScores
    from lt_trainer.evaluation.scorer import BatchShape as BatchShape
    from lt_trainer.evaluation.scorer import EvaluationError as EvaluationError
    from lt_trainer.evaluation.scorer import Scorer as Scorer
    from lt_trainer.evaluation.store_losses import GroupLoss as GroupLoss
    from lt_trainer.evaluation.store_losses import evaluate_store as evaluate_store
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "local_model": "LoadedModel load_model",
            "position_scores": "PositionScores",
            "scorer": "BatchShape EvaluationError Scorer",
            "store_losses": "GroupLoss evaluate_store",
        },
    )
