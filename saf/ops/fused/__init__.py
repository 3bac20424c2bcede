"""The paper's execution: live and frozen heads of a layer in one Triton launch."""
