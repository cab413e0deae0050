"""Text to token stores, packs and a deterministic stream of training rows."""
