"""Evaluation measures models: `perplexity`, `recall`, `answers` by likely `continuations`, and `zero_shot` tasks.

`passes` runs a model, `paired` is the statistics of two, `compare` compares finished runs, and `tables` prints them.
"""
