"""Rows of packs in an endless, computed order: streams, mixtures, buckets, and batches made ahead."""
