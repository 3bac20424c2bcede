"""What freezing some heads costs at once: the loss on held-out windows with them frozen, before any training."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from saf.adapters import adapter_for, unwrap
from saf.calibration.capture import evaluation_mode
from saf.errors import InputError
from saf.heads import Head, HeadSet
from saf.patterns import CompactPattern, DensePattern
from saf.surgery import install_, uninstall_

Patterns = Mapping[Head, CompactPattern | DensePattern]


class CostMeter:
    """Measure frozen head sets on a copy of a model, which itself is left alone."""

    def __init__(self, model: nn.Module, windows: Tensor, *, batch_size: int = 8):
        """Take held-out windows `[W, T + 1]`: T inputs and T targets. Raises InputError when there are none."""
        if windows.ndim != 2 or not len(windows) or windows.shape[1] < 2 or batch_size < 1:
            raise InputError(f"expected windows [W, T + 1] and a batch size; got {list(windows.shape)}, {batch_size}")
        self.windows = windows
        self.batch_size = batch_size
        self._model = copy.deepcopy(unwrap(model))
        self.baseline = self._log_probs()

    def log_probs(self, heads: HeadSet, patterns: Patterns, *, backend: str = "auto") -> Tensor:
        """Return log-probabilities of the targets, `[W, T]` float32 nats, with `heads` frozen."""
        with frozen_for_now(self._model, heads, [patterns[head] for head in heads], backend):
            return self._log_probs()

    def _log_probs(self) -> Tensor:
        """Return the log-probability of every next token, [windows, T - 1], float32 on the CPU."""
        adapter = adapter_for(self._model)
        rows = []
        with torch.no_grad(), evaluation_mode(self._model):
            for batch in self.windows.split(self.batch_size):
                batch = batch.to(adapter.device)
                rows.append(adapter.token_log_probs(batch[:, :-1], batch[:, 1:]).float().cpu())
        return torch.cat(rows)


@contextmanager
def frozen_for_now(model: nn.Module, heads: HeadSet, patterns: list[Any], backend: str) -> Iterator[None]:
    """Freeze these heads for the length of the block, then undo it, so that the model is as it came."""
    if not len(heads):
        yield
        return
    install_(model, heads, patterns, backend=backend)
    # Autocast keeps low-precision copies of weights, which surgery changes in place.
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        uninstall_(model, heads)
        torch.clear_autocast_cache()
