"""Llama as data (shape, parameters, costs) and, with [torch], as a module."""
