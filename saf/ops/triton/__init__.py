"""Triton kernels for frozen heads: pure functions on tensors, without autograd and without registration."""
