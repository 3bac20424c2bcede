"""Freeze a quarter of the heads of a transformers model halfway through a loop of your own: `python FILE [FOLDER]`."""

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import saf

LENGTH, UPDATES = 64, 20
text = torch.tensor(list(Path(__file__).read_bytes())).repeat(4)  # yours: token ids, one a byte here
windows = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
training, calibration = windows[8:], windows[:8]  # no calibration text is trained on

sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, **sizes))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for update in range(UPDATES):
    if update == UPDATES // 2:  # calibrate, select, fit, install; edits the optimiser's moments too
        print(saf.freeze_(model, [calibration], saf.FreezeConfig(rate=0.25, max_fit_kl=1.0), optimizer=optimizer))
    batch = training[torch.randint(len(training), (4,))]
    loss = model(batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"loss {loss.item():.3f} nats a token after {UPDATES} updates")
model.save_pretrained(sys.argv[1] if len(sys.argv) > 1 else "frozen")
