"""What serves the decoder around the seam: GELU and loss."""
