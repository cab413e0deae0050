"""Training loop, runs, their check and benchmark."""
