"""The paper's decoder and its presets.

`config` holds shapes and presets, `gpt` the model from token ids to loss, `attention` a layer's projections and mixing,
`rotary` its positions.
"""

from saf.models.config import PRESETS, GPTConfig, preset
from saf.models.gpt import GPT

__all__ = ["GPT", "PRESETS", "GPTConfig", "preset"]
