"""Frozen heads as a batch-shared block-Toeplitz product: the default way, anywhere.

`backend` is what the layer calls, `operator` the registered product and its gradient, `trained` that of patterns in
training; `tables` makes what is read from patterns, `config` says how a product runs, `launch` and `kernels` run it.
"""
