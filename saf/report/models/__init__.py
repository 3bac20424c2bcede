"""The page about a model of transformers with frozen heads."""
