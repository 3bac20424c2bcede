"""A whole layer without gradients behind one operator, however it is launched.

`operator` decides in the call between two launches, one for live and one for frozen heads, and the `one_launch` of few
tokens, which compiled code takes without an operator.
"""
