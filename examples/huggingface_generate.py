"""Freeze a quarter of the heads of a transformers model, save it, open it, generate: `python FILE [FOLDER]`."""

import sys

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import saf
import saf.integrations.transformers  # lets from_pretrained open folders with frozen heads

LENGTH = 64
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, **sizes))  # yours: from_pretrained
calibration = torch.randint(3, 256, (8, LENGTH))  # yours: text, of the longest input's length
print(saf.freeze_(model, [calibration], saf.FreezeConfig(rate=0.25, max_fit_kl=1.0)))

folder = sys.argv[1] if len(sys.argv) > 1 else "frozen"
model.save_pretrained(folder)
opened = AutoModelForCausalLM.from_pretrained(folder)
prompt = torch.randint(3, 256, (1, 8))
options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 16, "do_sample": False}
tokens = opened.generate(prompt, **options)
assert torch.equal(tokens, model.eval().generate(prompt, **options))
print(tokens[0].tolist())
