"""What serves the decoder around the seam: `gelu` with the product after it, and the `loss`; each with its kernel."""
