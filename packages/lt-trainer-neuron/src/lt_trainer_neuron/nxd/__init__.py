"""The backend of Trainium: neuronx-distributed (NxD) on torch-xla, the only modules of this package that import them.

What a step is made of stands apart from where it runs: `step` and `adamw` are tensor arithmetic, `llama` is a model of
whatever layers it is given, and three small seams say where: `device` (torch-xla, or the host), `ranks` (collectives of
NxD, or nobody else), `layers` (NxD's parallel layers, or torch's own). So one rank trains on plain torch-xla, the same
code runs on any CPU in tests, and NxD's own layers run on a CPU where its source is at hand.
"""
