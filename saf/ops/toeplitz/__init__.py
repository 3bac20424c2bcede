"""Frozen heads of whole sequences as a batch-shared block-Toeplitz product, which runs anywhere.

`operator` is the registered product and its gradient, `trained` that of patterns in training; `tables` makes what is
read from patterns, `config` says how a product runs, `launch` and `kernels` run it.
"""
