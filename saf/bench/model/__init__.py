"""Benchmarks of whole models: updates and prefill."""
