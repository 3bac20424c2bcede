"""Decoding: `op` has the operators of few queries after a cache, `kernels` the flash-decoding kernel."""
