"""Hugging Face transformers: importing this module makes `from_pretrained` open folders of models with frozen heads.

From then on a `Trainer` of such a model pushes all that its folder on a hub needs to open, and `generate` of any model
refuses, before the first token, such an assistant whose patterns are too short.

A model frozen by `saf.freeze_` is saved by its own `save_pretrained`: weights, layout, patterns and a section of the
README in one folder, which opens again with the same outputs bit for bit. `FreezeCallback` freezes heads while a
`Trainer` trains, `text_sequences` cuts calibration sequences out of text, `cache_bytes` says how much memory a cache
takes.

>>> import saf.integrations.transformers
>>> from transformers import AutoModelForCausalLM
>>> model = AutoModelForCausalLM.from_pretrained("frozen")  # doctest: +SKIP
"""

from transformers.utils.import_utils import is_accelerate_available

from saf.adapters.transformers.cache import cache_bytes
from saf.integrations.transformers.assistants import ask_assistants
from saf.integrations.transformers.callback import FreezeCallback
from saf.integrations.transformers.opening import open_frozen_folders
from saf.integrations.transformers.sequences import text_sequences
from saf.integrations.transformers.trainer import join_trainers

__all__ = ["FreezeCallback", "cache_bytes", "open_frozen_folders", "text_sequences"]

open_frozen_folders()
ask_assistants()
if is_accelerate_available():  # without it there is no Trainer
    join_trainers()
