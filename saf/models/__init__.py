"""The paper's decoder (`gpt`, compiled by layer in `by_layer`) and the interface to any supported model (`adapter`)."""

import saf.optimizer_state  # for its check of optimisers before each step, also of models never edited
from saf.models.gpt import GPT, PRESETS, GPTConfig, preset
