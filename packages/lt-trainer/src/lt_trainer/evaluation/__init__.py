"""Evaluation: scores of labels, losses over stores by source and length, and tasks."""

from typing import TYPE_CHECKING

from lt_trainer.lazy import lazy_exports

if TYPE_CHECKING:
    from lt_trainer.evaluation.encoding import PairEncoder as PairEncoder
    from lt_trainer.evaluation.generated_tasks import GENERATED_TASKS as GENERATED_TASKS
    from lt_trainer.evaluation.local_model import LoadedModel as LoadedModel
    from lt_trainer.evaluation.local_model import load_model as load_model
    from lt_trainer.evaluation.position_scores import PositionScores as PositionScores
    from lt_trainer.evaluation.requests import Score as Score
    from lt_trainer.evaluation.requests import ScoreRequest as ScoreRequest
    from lt_trainer.evaluation.requests import check_requests as check_requests
    from lt_trainer.evaluation.requests import score_requests as score_requests
    from lt_trainer.evaluation.scorer import BatchShape as BatchShape
    from lt_trainer.evaluation.scorer import EvaluationError as EvaluationError
    from lt_trainer.evaluation.scorer import Scorer as Scorer
    from lt_trainer.evaluation.store_losses import GroupLoss as GroupLoss
    from lt_trainer.evaluation.store_losses import StoreResult as StoreResult
    from lt_trainer.evaluation.store_losses import StoreText as StoreText
    from lt_trainer.evaluation.store_losses import evaluate_store as evaluate_store
    from lt_trainer.evaluation.tasks import EncodedTask as EncodedTask
    from lt_trainer.evaluation.tasks import Task as Task
    from lt_trainer.evaluation.tasks import TaskItem as TaskItem
    from lt_trainer.evaluation.tasks import TaskResult as TaskResult
    from lt_trainer.evaluation.tasks import evaluate_task as evaluate_task
    from lt_trainer.evaluation.tasks import find_tasks as find_tasks
    from lt_trainer.evaluation.tasks import task_metrics as task_metrics
    from lt_trainer.evaluation.weight_hashes import hash_tensor as hash_tensor
    from lt_trainer.evaluation.weight_hashes import hash_weights as hash_weights
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "encoding": "PairEncoder",
            "generated_tasks": "GENERATED_TASKS",
            "local_model": "LoadedModel load_model",
            "position_scores": "PositionScores",
            "requests": "Score ScoreRequest check_requests score_requests",
            "scorer": "BatchShape EvaluationError Scorer",
            "store_losses": "GroupLoss StoreResult StoreText evaluate_store",
            "tasks": "EncodedTask Task TaskItem TaskResult evaluate_task find_tasks task_metrics",
            "weight_hashes": "hash_tensor hash_weights",
        },
    )
