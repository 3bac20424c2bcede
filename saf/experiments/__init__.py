"""Experiments: the arms of a table as data, planned, trained in processes of their own, and rendered."""
