"""Freeze a quarter of the heads of a transformers model while a Trainer trains it: `python FILE [FOLDER]`."""

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.trainer import Trainer
from transformers.training_args import TrainingArguments

import saf
from saf.integrations.transformers import FreezeCallback

LENGTH = 64
text = torch.tensor(list(Path(__file__).read_bytes())).repeat(4)  # yours: token ids, one a byte here
windows = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
rows = [{"input_ids": row, "labels": row} for row in windows[8:]]

sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, **sizes))
folder = sys.argv[1] if len(sys.argv) > 1 else "trained"
arguments = TrainingArguments(folder, max_steps=20, per_device_train_batch_size=4, save_steps=5, report_to=[])
config = saf.FreezeConfig(rate=0.25, max_fit_kl=1.0)
freezing = FreezeCallback(config, calibration=[windows[:8]], schedule=saf.OneTime(0.5))
Trainer(model, arguments, train_dataset=rows, callbacks=[freezing]).train()
print(freezing.events[0].update, freezing.events[0].heads)
