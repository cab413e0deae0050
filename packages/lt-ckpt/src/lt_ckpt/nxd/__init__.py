"""Checkpoints of AWS neuronx-distributed (NxD): read, written and re-split without any Neuron package."""
