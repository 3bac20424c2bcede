"""`update_memory` estimates the memory of an update; `check_memory` refuses a run whose updates cannot fit."""

from typing import NamedTuple

import torch

from saf.errors import InputError
from saf.machine import Execution, free_bytes
from saf.models import GPTConfig
from saf.ops.loss_and_gelu import chunk_rows
from saf.records.table import byte_size
from saf.tasks import TextTask
from saf.train.config import TrainConfig, context_length
from saf.train.step import STATE_BYTES, Parallel, Shards


class UpdateMemory(NamedTuple):
    """Bytes of an update's memory on one device."""

    state: float
    """Weights, gradients and moments."""
    activations: float
    """Activations and logits of a micro-batch, and copies of weights."""

    @property
    def total(self) -> float:
        return self.state + self.activations


def update_memory(shape: GPTConfig, tokens: int, *, recomputes: bool = False, shards: int = 1) -> UpdateMemory:
    """Estimate the memory of updates of an ordinary model in bf16, with `tokens` in a micro-batch.

    `recomputes` says that activation checkpointing keeps only the input of each layer. Each of `shards` processes holds
    an equal share of the state and gathers a layer at a time, with the next one. Peaks measured on an H200 are 0.98 to
    1.03 of the estimate for 1B and 124M (results/bench).
    """
    parameters = shape.num_parameters
    # In hidden sizes: a layer's matrices are q, k, v, the output and two of the MLP, and about as many activations a
    # token stay until its backward pass, in 16 bits.
    widths = 4 + 2 * shape.mlp_ratio
    of_layer = widths * shape.hidden_size**2
    if shards > 1:  # two layers, one layer's gradients; embedding and norms whole with their gradients
        copies = (2 * 2 + 4) * of_layer + 2 * 4 * (parameters - shape.num_layers * of_layer)
    else:  # autocast keeps 16-bit copies through a micro-batch
        copies = 2 * parameters
    layer = widths * 2 * tokens * shape.hidden_size
    inputs = 4 * tokens * shape.hidden_size * shape.num_layers  # of a float32 residual stream
    logits = 8.0 * (shape.vocab_size * min(tokens, chunk_rows(shape.vocab_size)))  # with their gradients
    layers = layer + inputs if recomputes else layer * shape.num_layers
    return UpdateMemory(STATE_BYTES * parameters / shards, layers + logits + copies)


CERTAIN_SHARE = 0.6
"""Share of the estimated memory that updates certainly take: peaks on an H200 were 0.9 to 1.03 of the estimate, and
0.75 with half of the heads pruned."""


def check_memory(config: TrainConfig, execution: Execution, shape: GPTConfig, parallel: Parallel) -> None:
    """Raise InputError for updates that certainly take more memory than the device has."""
    # Sequences of other tasks have many lengths, mostly far below the context: only the weights are certain.
    tokens = config.batch_size * context_length(config) if config.task == TextTask.name else 0
    shards = parallel.processes if parallel.kind == Shards.kind else 1
    needed = update_memory(shape, tokens, recomputes=config.activation_checkpointing, shards=shards)
    device, cuda = execution.device, execution.device.type == "cuda"
    # A GPU's free memory would leave out what an earlier run in this process is about to free.
    available = torch.cuda.get_device_properties(device).total_memory if cuda else free_bytes(device)
    if available is not None and CERTAIN_SHARE * needed.total > available:
        raise InputError(
            f"training needs about {byte_size(needed.total)} of memory ({byte_size(needed.state)} for weights and "
            f"moments), got {byte_size(available)}; lower batch_size, length or the model's size"
        )
