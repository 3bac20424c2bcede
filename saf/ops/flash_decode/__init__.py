"""Few queries after a cache: live and frozen heads of a layer in one launch; op.py first, then kernels.py."""
