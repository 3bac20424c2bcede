"""Models of Hugging Face transformers: attention, families, caches, folders, the Trainer and lm-eval."""
