"""Packs: which documents stand in which training row, as an index over a store."""
