"""A few rows of a layer, as decoding asks for: stretches of keys by themselves, and then put together.

`frozen` computes rows of frozen heads alone, `split` live heads beside them in the same launch; `kernels` run both.
"""
