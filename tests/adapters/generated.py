"""What tests of generation share: which heads are frozen, and how tokens are asked for."""

import torch

from saf.heads import HeadSet

FROZEN = HeadSet([(0, 1), (1, 0), (1, 1), *((2, head) for head in range(4))])
"""Of grouped queries in layer 0 one head, which leaves groups uneven, in 1 the first group, in 2 all."""
SETTINGS = {"eos_token_id": None, "suppress_tokens": [0]}
"""Padding is told by its token where a helping model generates."""
NEW = 7


def generate(model, ids, mask, **options):
    torch.manual_seed(11)
    return model.generate(ids, attention_mask=mask, **{"max_new_tokens": NEW} | SETTINGS | options)
