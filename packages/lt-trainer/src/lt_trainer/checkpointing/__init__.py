"""Checkpoints of a run: save, restore, rollback, mirror, and start from a pretrained model."""

from typing import TYPE_CHECKING

from lt_trainer.lazy import lazy_exports

if TYPE_CHECKING:
    from lt_trainer.checkpointing.async_saver import CheckpointSaver as CheckpointSaver
    from lt_trainer.checkpointing.checkpoint_manager import CheckpointManager as CheckpointManager
    from lt_trainer.checkpointing.checkpoint_manager import max_checkpoints_on_disk as max_checkpoints_on_disk
    from lt_trainer.checkpointing.mirror import RunMirror as RunMirror
    from lt_trainer.checkpointing.mirror import StopRequested as StopRequested
    from lt_trainer.checkpointing.mirror import check_mirror as check_mirror
    from lt_trainer.checkpointing.pretrained import PretrainedWeights as PretrainedWeights
    from lt_trainer.checkpointing.pretrained import tokens_by_id as tokens_by_id
    from lt_trainer.checkpointing.resume import RunRestorer as RunRestorer
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "async_saver": "CheckpointSaver",
            "checkpoint_manager": "CheckpointManager max_checkpoints_on_disk",
            "mirror": "RunMirror StopRequested check_mirror",
            "pretrained": "PretrainedWeights tokens_by_id",
            "resume": "RunRestorer",
        },
    )
