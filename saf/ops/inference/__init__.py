"""A whole layer without gradients: one operator, one launch or two."""
