"""Training data: stores, mixtures, synthetic rows or a custom loader, as step batches."""
