"""The paper's decoder and its presets.

`config` holds shapes and presets, `gpt` the model from token ids to loss, `attention` a layer's projections and mixing,
`rotary` its positions.
"""

from saf.models.gpt import GPT, PRESETS, GPTConfig, preset

__all__ = ["GPT", "PRESETS", "GPTConfig", "preset"]
