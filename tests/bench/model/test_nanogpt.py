"""The comparison with nanoGPT: its tool runs with a model of nanoGPT's interface and writes a record of its kind."""

import torch

from saf.bench.kinds import KINDS
from saf.records.files import read_json
from tools import compare_nanogpt

MODEL = """
from dataclasses import dataclass

import torch
from torch.nn import functional


@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float
    bias: bool


class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed = torch.nn.Embedding(config.vocab_size, 8)
        self.head = torch.nn.Linear(8, config.vocab_size)

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), lr=learning_rate, betas=betas, weight_decay=weight_decay)

    def forward(self, ids, targets):
        logits = self.head(self.embed(ids))
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""


def test_both_updates_run_and_the_record_has_a_table(tmp_path, monkeypatch):
    (tmp_path / "model.py").write_text(MODEL)
    out = tmp_path / "nanogpt.json"
    words = ["--nanogpt", str(tmp_path), "--out", str(out), "--points", "16x1x1", "--model", "tiny", "--pairs", "2"]
    monkeypatch.setattr("sys.argv", ["compare_nanogpt.py", *words])
    # nanoGPT's script lets float32 products run in tf32, for its whole process: not for the tests after this one.
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        compare_nanogpt.main()
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    record = read_json(out)
    assert record["finished"]
    assert [(row["arm"], row["control"], row["pairs"]) for row in record["rows"]] == [
        ("control nanoGPT", True, 2),
        ("ordinary", False, 2),
    ]
    assert any("nanoGPT's own update" in str(part) for part in KINDS["nanogpt"].tables(record))
