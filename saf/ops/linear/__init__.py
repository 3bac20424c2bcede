"""Backend `linear`: `op` has the backend and its operator, `tables` the chunked algorithm, `kernels` the GPU's part."""
