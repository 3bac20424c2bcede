"""Small models of transformers with random weights, and heads of theirs to freeze."""

import pytest
import torch

import saf
from saf.heads import HeadSet
from saf.models.adapter import adapter_for, rows_of
from saf.targets import dense_pattern

try:
    import transformers
except ModuleNotFoundError:  # tests of models of transformers skip then
    transformers = None  # type: ignore[assignment]

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
WINDOW = 8
GEMMA = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 40,
    "sliding_window": WINDOW,
    "layer_types": ["full_attention"] * 3 + ["sliding_attention"],
}
"""Heads of the last layer stay ordinary: it attends within a window."""
FAMILIES = {
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 16}),
    "llama": ("Llama", {"num_key_value_heads": 4}),
    "llama-grouped": ("Llama", {"num_key_value_heads": 2}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2}),
    "llama-biases": ("Llama", {"num_key_value_heads": 4, "attention_bias": True}),
    "mistral": ("Mistral", {"num_key_value_heads": 1, "sliding_window": None}),
    "arcee": ("Arcee", {"num_key_value_heads": 2}),
    "helium": ("Helium", {"num_key_value_heads": 4, "head_dim": 12}),
    "gpt2": ("GPT2", {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "phi3": ("Phi3", {"num_key_value_heads": 2, "partial_rotary_factor": 0.5}),
    "gemma2": ("Gemma2", GEMMA | {"attn_logit_softcapping": 2.0, "attn_implementation": "eager"}),
    "gemma3": ("Gemma3", GEMMA),
}
CLASSES = {"GPT2": ("GPT2Config", "GPT2LMHeadModel"), "Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM")}
"""Where they are not called as the others are."""
FROZEN = HeadSet([(0, 1), (1, 0), (1, 1), *((2, head) for head in range(4))])
"""Of grouped queries in layer 0 one head, which leaves groups uneven, in 1 the first group, in 2 all."""
NEW = 7
"""Tokens that `generate` adds."""
HEADS = HeadSet([(0, 1), (0, 2), (1, 0), (1, 1), (2, 3)])
"""In layer 1 the whole first group of two."""


def make(family: str, **changes):
    pytest.importorskip("transformers")
    name, more = FAMILIES[family]
    of_config, of_model = CLASSES.get(name, (f"{name}Config", f"{name}ForCausalLM"))
    config = getattr(transformers, of_config)(**(SIZES | more | changes))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, of_model)(config).eval()
        for parameter in model.parameters():
            parameter.data.normal_(std=0.3 if parameter.dim() > 1 else 1.0)
    return model


def weight_of(model, layer: int, role: str = "value") -> torch.Tensor:
    """Rows of a role, those of an output along its own dimension, as a view."""
    rows = rows_of(adapter_for(model).sites()[layer], role)
    return rows.of(rows.parameter.detach()).movedim(rows.dimension, 0)


def freezable(model) -> list[int]:
    return [layer for layer, site in enumerate(adapter_for(model).sites()) if site.unsupported_reason is None]


def tokens(rows: int = 4, length: int = LENGTH, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def freeze(model, heads: HeadSet = HEADS, **options):
    patterns = dense_pattern(saf.calibrate(model, [tokens()], collect=("mean",)), heads, "mean", dtype=torch.float32)
    saf.install_(model, heads, [patterns[number] for number in range(len(heads))], **options)
    return dict(zip(heads, patterns.weights, strict=True))


def logits(model, ids: torch.Tensor | None = None, **options) -> torch.Tensor:
    """Logits of one pass without cache and gradients, by default of two sequences."""
    with torch.no_grad():
        return model(tokens(2, seed=6) if ids is None else ids, use_cache=False, **options).logits


def generate(model, ids, mask, **options):
    """Tokens of `model.generate`; an assistant knows padding by its token."""
    torch.manual_seed(11)
    settings = {"max_new_tokens": NEW, "eos_token_id": None, "suppress_tokens": [0]}
    return model.generate(ids, attention_mask=mask, **settings | options)
