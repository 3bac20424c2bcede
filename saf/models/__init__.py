"""The paper's decoder, `gpt`, and what the package asks of any model, `adapter`; `by_layer` compiles the decoder."""

import saf.optimizer_state  # noqa: F401, so that every step is checked, also those of a model that is never edited
from saf.models.gpt import GPT, PRESETS, GPTConfig, preset

__all__ = ["GPT", "PRESETS", "GPTConfig", "preset"]
