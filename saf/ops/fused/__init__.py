"""Backend `fused`, the paper's execution: `op` has the backend and its operators, `tables` what the kernels read."""
