"""Held-out perplexity, paired differences, and the comparison of two finished runs."""
