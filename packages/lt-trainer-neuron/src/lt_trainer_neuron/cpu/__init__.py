"""The cpu backend: the plan of a Trainium run over gloo, on any torch, without neuronx-distributed (NxD).

Same ranks, same cuts, same order of heads, same ZeRO-1 rows as NxD's. It exists to compare numbers, and is kept small:
where a faster way would need more code, this takes the slower one. Nothing here knows a Neuron package.
"""
