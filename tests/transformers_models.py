"""Small models of transformers, made here, and heads of theirs to freeze."""

import pytest
import torch

import saf
from saf.estimates import dense_pattern
from saf.heads import HeadSet

transformers = pytest.importorskip("transformers")

LENGTH, VOCAB = 32, 61
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 16}),
    "llama": ("Llama", {"num_key_value_heads": 4}),
    "llama-grouped": ("Llama", {"num_key_value_heads": 2}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2}),
    "llama-biases": ("Llama", {"num_key_value_heads": 4, "attention_bias": True}),
    "mistral": ("Mistral", {"num_key_value_heads": 1, "sliding_window": None}),
}
HEADS = HeadSet([(0, 1), (0, 2), (1, 0), (1, 1), (2, 3)])
"""In layer 1 the whole first group of two."""


def make(family: str, **changes):
    name, more = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**(SIZES | more | changes))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
        for parameter in model.parameters():
            parameter.data.normal_(std=0.3 if parameter.dim() > 1 else 1.0)
    return model


def tokens(rows: int = 4, length: int = LENGTH, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def freeze(model, heads: HeadSet = HEADS, **options):
    patterns = dense_pattern(saf.calibrate(model, [tokens()], collect=("mean",)), heads, "mean", dtype=torch.float32)
    saf.install_(model, heads, [patterns[number] for number in range(len(heads))], **options)
    return dict(zip(heads, patterns.weights, strict=True))
