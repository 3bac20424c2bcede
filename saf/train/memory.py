"""What updates take of a device's memory, estimated from the model's shape and the tokens of a micro-batch."""

from saf.models.config import GPTConfig
from saf.ops.decoder import chunk_rows

STATE_BYTES = 16
"""Bytes of a parameter's float32 weight, gradient and two moments."""
COPY_BYTES = 2
"""Bytes a parameter: the copy in 16 bits that autocast keeps through a micro-batch."""
ACTIVATION_BYTES, LOGIT_BYTES = 24, 8
"""Bytes a token, layer and channel, and bytes a logit of those held at once: the remainder of measured peaks on an
H200, of 1B at 1 and 2 x 8,192 tokens and of 124M at 8 x 4,096 (results/bench), within 4%."""


def peak_bytes(shape: GPTConfig, tokens: int) -> float:
    """Return the peak memory of updates of an ordinary model with `tokens` in a micro-batch, on one GPU."""
    activations = ACTIVATION_BYTES * tokens * shape.num_layers * shape.hidden_size
    return (STATE_BYTES + COPY_BYTES) * shape.num_parameters + activations + logit_bytes(shape, tokens)


def logit_bytes(shape: GPTConfig, tokens: int) -> float:
    """Return the bytes of the logits held at once, and of their gradient."""
    return LOGIT_BYTES * float(shape.vocab_size * min(tokens, chunk_rows(shape.vocab_size)))
