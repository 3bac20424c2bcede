"""The patterns that frozen heads have, and their sums in the log domain."""
