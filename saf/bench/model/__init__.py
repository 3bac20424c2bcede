"""Benchmarks of whole models: updates, prefill and decoding."""
