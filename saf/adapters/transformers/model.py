"""A causal language model as transformers calls it: token ids in, an object with `logits` out, a `config` beside."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from saf.adapters.adapter import LanguageModel
from saf.errors import UnsupportedError


class TransformersModel(LanguageModel):
    """Answer for a causal language model of transformers, or one that is called alike."""

    one_graph = False

    def __init__(self, model: Any):
        self.model = model

    @property
    def device(self) -> torch.device:
        """Return the device of the first parameter, the embedding's."""
        return next(self.model.parameters()).device

    @property
    def max_length(self) -> int | None:
        """Return the number of positions in the configuration."""
        return getattr(self.model.config, "max_position_embeddings", None)

    @property
    def vocab_size(self) -> int | None:
        """Return the number of token ids in the configuration."""
        return getattr(self.model.config, "vocab_size", None)

    def check_next_token(self) -> None:
        """Raise UnsupportedError for a model of transformers that has a head of labels, told by its class's name."""
        if type(self.model).__name__.endswith(("Classification", "QuestionAnswering")):
            raise UnsupportedError(
                f"{type(self.model).__name__} predicts no next tokens, whose loss held-out sequences, gate_taylor and "
                "perplexity are of: leave those out, or take the family's model for causal language modelling"
            )

    def next_token_loss(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of `targets [B, T]` given `input_ids [B, T]`, from float32 logits."""
        return F.cross_entropy(self._logits(input_ids).flatten(0, 1), targets.flatten())

    def token_log_probs(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        """Return log p of every target, `[B, T]` float32, in nats."""
        return -F.cross_entropy(self._logits(input_ids).transpose(1, 2), targets, reduction="none")

    @staticmethod
    def last_logits(model: Any, input_ids: Tensor, count: int = 1) -> Tensor:
        """Return the logits `[B, count, V]` at the last positions of `input_ids [B, T]`."""
        return model(input_ids=input_ids, use_cache=False, logits_to_keep=count).logits

    def _logits(self, input_ids: Tensor) -> Tensor:
        """Return float32 logits `[B, T, V]`."""
        self.check_next_token()
        return self.model(input_ids=input_ids, use_cache=False).logits.float()
