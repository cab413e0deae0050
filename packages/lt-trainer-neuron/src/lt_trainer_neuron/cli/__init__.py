"""Commands that this engine adds to `lt train`: env, precompile, neuron-cache."""
