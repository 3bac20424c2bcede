"""The page about runs or a frozen model (`saf report`), and the tables that benchmarks print."""
