"""Frozen heads as a batch-shared block-Toeplitz product: backend, operator, tables, kernels."""
