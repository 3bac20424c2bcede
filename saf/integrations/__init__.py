"""What other libraries need to work with frozen heads, and what measurements need of theirs."""
