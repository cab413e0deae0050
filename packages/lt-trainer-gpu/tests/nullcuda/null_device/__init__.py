"""CUDA device that computes nothing, and engines that run on it: what a step asks of the device, without one.

build.py    compiles the device: libraries that are preloaded in place of CUDA's
server.py   a process with the device, in which ranks are forked
ranks.py    what a rank does: some steps of an engine, with marks in the device's log
trace.py    the log, read: synchronizations, kernels, products, collectives
"""
