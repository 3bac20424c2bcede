"""The paper's decoder (`gpt`, compiled by layer in `by_layer`) and the interface to any supported model (`adapter`)."""

import saf.optimizer_state  # noqa: F401, for its check of optimisers before each step, also of models never edited
from saf.models.gpt import GPT, PRESETS, GPTConfig, preset

__all__ = ["GPT", "PRESETS", "GPTConfig", "preset"]
