"""Training loop, runs, preflight and benchmark."""
