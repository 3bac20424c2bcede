"""The paper's execution: live and frozen heads of a layer in one Triton launch, tiles of P rebuilt in registers.

`operator` is the registered forward and backward, `tables` what they read, `launch` and `kernels` run them. Few tokens
without gradients take the forward launch too, see `saf.ops.inference`.
"""
