"""Trainium backend: neuronx-distributed (NxD) on torch-xla.

Only modules of this subpackage import them. The arithmetic of a step is independent of the device: `train_step` is
tensor arithmetic, and `decoder` is a model over an abstract layer factory. Three interfaces bind them to a device:
`device` (torch-xla, or the host), `collectives` (NxD's, or a single rank), `layers` (NxD's parallel layers, or torch's
own). So one rank trains on plain torch-xla, the same code runs on any CPU in tests, and NxD's own layers run on a CPU
where its source is available.
"""
