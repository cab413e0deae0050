"""Checkpoints of a run: save, restore, rollback, mirror, and start from a pretrained model."""
