"""What every lt training run shares: recipe, loop, metrics, signals, run directory."""
