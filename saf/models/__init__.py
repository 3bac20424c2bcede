"""The paper's decoder, `gpt`, and what the package asks of any model, `adapter`.

`by_layer` compiles the decoder layer by layer; `description` holds frozen heads as plain data for files.
"""

from saf.models.gpt import GPT, PRESETS, GPTConfig, preset

__all__ = ["GPT", "PRESETS", "GPTConfig", "preset"]
