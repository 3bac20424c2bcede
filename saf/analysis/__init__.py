"""Analyses of heads, selections and patterns: measurements around freezing that decide nothing by themselves."""
