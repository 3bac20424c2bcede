"""Frozen heads in linear time: `operator` has the algorithm, as matrix products and as the registered operator.

`kernels` are its two launches on CUDA, `launch` chooses their tiles. docs/method.md has the derivation.
"""
