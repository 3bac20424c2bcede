"""The paper's decoder and its presets."""

from saf.models.config import PRESETS, GPTConfig, preset
from saf.models.gpt import GPT

__all__ = ["GPT", "PRESETS", "GPTConfig", "preset"]
