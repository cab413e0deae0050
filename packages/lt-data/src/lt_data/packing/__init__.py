"""Packs: training rows as an index over a token store."""
