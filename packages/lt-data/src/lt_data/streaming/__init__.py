"""Streams of packed rows in a computed, endless order: mixtures, prefetching."""
