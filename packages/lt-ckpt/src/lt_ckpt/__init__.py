"""Checkpoints that are committed, verified, resharded and exported."""
