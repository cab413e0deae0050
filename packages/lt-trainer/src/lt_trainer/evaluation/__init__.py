"""Evaluation: scores of labels, losses over stores by source and length, and tasks."""
