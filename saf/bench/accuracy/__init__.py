"""Numerical errors against float64."""
