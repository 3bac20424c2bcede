"""Llama and models like it: separate projections, rotary positions, grouped queries or not, biases or not."""

from saf.adapters.transformers.family import Family

SEPARATE = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}

WINDOW = "a sliding window has to be as long as the inputs, and wants a growing cache"
WINDOWS = "layers with a sliding window stay ordinary, and want a growing cache"

LLAMA = Family(name="Llama", attention="LlamaAttention", projections=SEPARATE)
MISTRAL = Family(name="Mistral", attention="MistralAttention", projections=SEPARATE, particular=WINDOW)
QWEN2 = Family(name="Qwen2", attention="Qwen2Attention", projections=SEPARATE, particular=WINDOWS)
QWEN3 = Family(name="Qwen3", attention="Qwen3Attention", projections=SEPARATE, particular=WINDOWS)
