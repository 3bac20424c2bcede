"""Importing this module lets `from_pretrained` of Hugging Face transformers open models with frozen heads.

`save_pretrained` of a frozen model writes weights, layout, patterns and a section of the README into one folder. Opened
again, the model computes the same outputs bit for bit. `FreezeCallback` freezes heads while a `Trainer` trains,
`text_sequences` returns calibration sequences from text, and `cache_bytes` the memory of a KV cache.

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
from saf.hf.pretrained import patch_pretrained
from saf.hf.trainer import FreezeCallback, patch_trainer

__all__ = ["FreezeCallback", "cache_bytes", "text_sequences"]

# The only import of this package that patches another library; freezing a model of transformers does so too.
patch_pretrained()
if is_accelerate_available():  # transformers cannot import its Trainer without it
    patch_trainer()


def text_sequences(
    texts: Iterable[str], tokenizer: Any, *, length: int, count: int = 32, batch_size: int = 8, bos: bool = False
) -> list[Tensor]:
    """Return calibration sequences for `saf.freeze_` from texts: batches of token ids, `[<= batch_size, length]`.

    >>> saf.freeze_(model, text_sequences(texts, tokenizer, length=2048), saf.FreezeConfig(rate=0.25))  # doctest: +SKIP

    Texts are tokenised without BOS, joined with the tokenizer's end of text, and cut into the first `count` sequences;
    with `bos` each sequence begins with the tokenizer's BOS. Raises InputError for too little text.
    """
    if isinstance(texts, str):
        raise InputError("texts must be an iterable of texts, got one; give a list of it")
    if bos and tokenizer.bos_token_id is None:
        raise InputError("bos must be False for a tokenizer without BOS, got True; leave it out")
    own = length - bos  # tokens of text in a sequence
    if own < 1:
        raise InputError(f"length must be at least {1 + bos}, got {length}")
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
