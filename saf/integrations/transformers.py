"""Hugging Face transformers: importing this module makes `from_pretrained` open folders of models with frozen heads.

`save_pretrained` of a model frozen by `saf.freeze_` writes weights, layout, patterns and a section of the README into
one folder, which opens again with the same outputs bit for bit. `FreezeCallback` freezes heads while a `Trainer`
trains, `text_sequences` cuts calibration sequences out of text, `cache_bytes` is the memory that a cache takes.

>>> import saf.integrations.transformers
>>> from transformers import AutoModelForCausalLM
>>> model = AutoModelForCausalLM.from_pretrained("frozen")  # doctest: +SKIP
"""

from transformers.utils.import_utils import is_accelerate_available

from saf.hf.cache import cache_bytes
from saf.hf.pretrained import watch_folders
from saf.hf.sequences import text_sequences
from saf.hf.trainer import FreezeCallback, join_trainers

__all__ = ["FreezeCallback", "cache_bytes", "text_sequences"]

watch_folders()
if is_accelerate_available():  # without it there is no Trainer
    join_trainers()
