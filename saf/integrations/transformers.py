"""Hugging Face transformers: importing this module makes `from_pretrained` open folders of models with frozen heads.

`save_pretrained` of a model frozen by `saf.freeze_` writes weights, layout, patterns and a section of the README into
one folder, which opens again with the same outputs bit for bit. `FreezeCallback` freezes heads while a `Trainer`
trains, `text_sequences` cuts calibration sequences out of text, `cache_bytes` is the memory that a cache takes.

>>> import saf.integrations.transformers
>>> from transformers import AutoModelForCausalLM
>>> model = AutoModelForCausalLM.from_pretrained("frozen")  # doctest: +SKIP
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers.utils.import_utils import is_accelerate_available

from saf.errors import InputError
from saf.hf.cache import cache_bytes
from saf.hf.pretrained import watch_folders
from saf.hf.trainer import FreezeCallback, join_trainers

__all__ = ["FreezeCallback", "cache_bytes", "text_sequences"]

watch_folders()
if is_accelerate_available():  # without it there is no Trainer
    join_trainers()


def text_sequences(
    texts: Iterable[str], tokenizer: Any, *, length: int, count: int = 32, batch_size: int = 8, bos: bool = False
) -> list[Tensor]:
    """Return calibration sequences of some texts for `saf.freeze_`: token ids in batches `[<= batch_size, length]`.

    >>> saf.freeze_(model, text_sequences(texts, tokenizer, length=2048), saf.FreezeConfig(rate=0.25))  # doctest: +SKIP

    Texts are tokenised without BOS, joined with the tokenizer's end of text, and cut into the first `count` sequences;
    with `bos` each sequence begins with the tokenizer's BOS. Raises InputError for too little text.
    """
    if isinstance(texts, str):
        raise InputError("texts must be an iterable of texts, got one; give a list of it")
    if length <= bos or (bos and tokenizer.bos_token_id is None):
        raise InputError(f"length must exceed the BOS token's, and bos needs a tokenizer with one; got length {length}")
    own = length - bos
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    stream: list[int] = []
    for text in texts:
        stream += tokenizer(text, add_special_tokens=False)["input_ids"] + end
        if len(stream) >= count * own:
            break
    if len(stream) < count * own:
        raise InputError(f"texts must have {count * own} tokens for {count} sequences of {length}, got {len(stream)}")
    rows = torch.tensor(stream[: count * own]).view(count, own)
    if bos:
        rows = torch.cat([torch.full((count, 1), tokenizer.bos_token_id), rows], dim=1)
    return list(rows.split(batch_size))
