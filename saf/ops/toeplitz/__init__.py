"""Backend `toeplitz`: `op` has the backend and its operators, `tables` what they read, `kernels` the GPU's part."""
