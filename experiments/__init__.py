"""Experiments around the package: analyses of heads, selections and patterns."""
