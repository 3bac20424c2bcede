"""Benchmarks of one layer's attention."""
