"""Frozen heads in linear time: `operator` has the algorithm, as matrix products and as the registered operator.

`kernels` are its launches on CUDA, and `launch` chooses their tiles.
"""
