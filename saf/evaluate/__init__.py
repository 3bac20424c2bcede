"""Evaluation measures models: `perplexity`, `recall`, and `answers` to questions, each with its record and tables.

`passes` runs a model, `paired` is the statistics of two, `compare` compares finished runs, and `tables` prints them.
"""
