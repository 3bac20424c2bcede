"""The paper's decoder, `gpt`, and what the package asks of any model, `adapter`; `by_layer` compiles the decoder."""

from saf.models.gpt import GPT, PRESETS, GPTConfig, preset

__all__ = ["GPT", "PRESETS", "GPTConfig", "preset"]
