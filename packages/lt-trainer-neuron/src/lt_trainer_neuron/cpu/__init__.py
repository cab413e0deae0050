"""CPU backend: the parallel layout of a Trainium run over gloo, without neuronx-distributed (NxD).

Runs on any torch. Same ranks, shards, order of heads and ZeRO-1 rows as NxD. It exists to compare numbers and is kept
small: simpler code is preferred over faster code. No Neuron package is imported here.
"""
