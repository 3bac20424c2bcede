"""Benchmarks of whole models: updates, prefill, attention layers and decoding."""
