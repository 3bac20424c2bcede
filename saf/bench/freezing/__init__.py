"""Benchmarks of the intervention that freezes heads."""
