"""Run folders with invented numbers, in the layout that a training run writes, and a small data folder."""

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from saf.records.files import read_json, write_lines
from saf.records.result import SCHEMA
from saf.records.run import append_event
from saf.tasks.text import write_losses


@dataclass
class Shape:
    """Size of the invented model and run."""

    layers: int = 3
    heads: int = 4
    length: int = 64
    updates: int = 60
    freeze_update: int = 30
    windows: int = 40
    rate: float = 0.25


def write_pair(
    folder: Path, shape: Shape | None = None, *, cost: float = 0.004, speedup: float = 1.1
) -> tuple[Path, Path]:
    """Write an ordinary and a frozen run of one seed; `cost` nats dearer, `speedup` times faster after the event."""
    ordinary = write_run(folder / "ordinary", shape)
    return ordinary, write_run(folder / "frozen", shape, frozen=True, cost=cost, speedup=speedup)


def write_run(
    folder: Path, shape: Shape | None = None, *, frozen: bool = False, cost: float = 0.0, speedup: float = 1.0
) -> Path:
    """Write one run folder and return it."""
    shape = shape or Shape()
    folder.mkdir(parents=True)
    model = {"vocab_size": 512, "num_layers": shape.layers, "num_heads": shape.heads, "max_length": shape.length}
    freeze = {"operation": "freeze", "rate": shape.rate, "score": "variance", "pattern": "mean", "max_fit_kl": 0.2}
    config = {
        "schema": "saf.run/1", "model": model | {"hidden_size": 64, "position": "rope"},
        "train": {"updates": shape.updates, "batch_size": 8, "length": shape.length, "seed": 1337, "lr": 6e-4},
        "settings": {"freeze": freeze if frozen else None}, "data": {"folder": "data/corpus", "fingerprint": "d" * 64},
        "parent": None,
    }  # fmt: skip
    write(folder / "config.json", config)
    _write_metrics(folder, shape, cost=cost, speedup=speedup)
    intervention = _write_freeze(folder, shape, freeze) if frozen else None
    loss, heads = _write_evaluation(folder, shape, cost=cost), intervention["heads"] if intervention else []
    median = 0.5 / speedup
    result = {
        "schema": SCHEMA, "kind": "run", "settings": {}, "arm": "frozen" if frozen else "ordinary",
        "updates": shape.updates, "tokens": shape.updates * 8 * shape.length, "train_loss": 3.0,
        "report_loss": loss, "report_perplexity": math.exp(loss), "unigram_entropy": 7.2,
        "update_seconds": {"median": median, "first_update": 41, "last_update": 60},
        "peak_memory_bytes": 15_560_000_000 - 500_000_000 * frozen,
        "time": _times(frozen=frozen), "missing": [], "intervention": intervention,
        "provenance": {
            "source_hash": "a" * 64, "config_hash": "b" * 64, "data": {"report": "d" * 64},
            "checkpoints": {"parent": "c" * 64, "final": f"{len(heads):064}"}, "heads": heads, "seed": 1337,
            "versions": {"torch": "2.13.0", "saf": "0.1.0"}, "device": "cpu", "commit": "0123abc",
            "command": "saf pretrain --preset tiny", "date": "2026-01-01T00:00:00+00:00",
        },
    }  # fmt: skip
    write(folder / "result.json", result)
    return folder


def write(path: Path, record: Any) -> None:
    path.write_text(json.dumps(record))


def edit(path: Path, **changes: Any) -> None:
    """Change values of a JSON file; `__` in a name goes into nested objects."""
    record = read_json(path)
    for name, value in changes.items():
        *parents, last = name.split("__")
        at = record
        for parent in parents:
            at = at[parent]
        at[last] = value
    write(path, record)


def _times(*, frozen: bool) -> dict[str, Any]:
    """Return a result's times: a frozen arm is dearer by its intervention and by compiling twice."""
    parts = {"loading": 2.0, "compilation": 8.0 if frozen else 4.0, "training": 27.0 if frozen else 30.0}
    parts |= {"intervention": 1.0 if frozen else 0.0, "monitoring": 3.0, "checkpoints": 1.0, "afterwards": 2.0}
    every = {"seconds": 42.0 if frozen else 40.0, "includes": list(parts)[:-1]}
    warm = {"seconds": 32.0 if frozen else 34.0, "includes": list(parts)[2:-1]}
    return {"everything": every, "warm": warm, "parts": parts, "parent_parts": None}


def patterns(shape: Shape) -> dict[str, torch.Tensor]:
    """Return alpha and rho `[L, H, T]` of invented heads."""
    generator = torch.Generator().manual_seed(7)
    slope = 0.3 + 2.5 * torch.rand(shape.layers, shape.heads, 1, generator=generator, dtype=torch.float64)
    alpha = 0.15 * torch.randn(shape.layers, shape.heads, shape.length, generator=generator, dtype=torch.float64)
    alpha[..., 0] += 1.5
    return {"alpha": alpha, "rho": -slope * torch.log1p(torch.arange(shape.length, dtype=torch.float64))}


def _write_metrics(folder: Path, shape: Shape, *, cost: float, speedup: float) -> None:
    random = np.random.default_rng(3)
    lines, probes = [], []
    for update in range(1, shape.updates + 1):
        after = update - shape.freeze_update
        loss = 3.0 + 6.0 * np.exp(-update / (0.12 * shape.updates)) + 0.04 * random.standard_normal()
        gap = cost * (1 + 8 * np.exp(-40 * after / shape.updates) + 0.6 * random.standard_normal())
        loss += gap * (after > 0)
        seconds = 0.5 * (1 + 0.01 * random.standard_normal()) / (speedup if after > 0 else 1.0)
        seconds += 4.0 * (cost > 0 and after == 1)
        line = {"update": update, "tokens": update * 8 * shape.length, "loss": loss, "lr": 6e-4, "grad_norm": 0.5}
        lines.append(line | {"update_seconds": seconds})
        if update % max(1, shape.updates // 10) == 0:
            probes.append({"update": update, "partition": "controller", "loss": loss + 0.02, "when": "periodic"})
    write_lines(folder / "metrics.jsonl", lines)
    write_lines(folder / "evaluations.jsonl", probes)


def _write_freeze(folder: Path, shape: Shape, config: dict[str, Any]) -> dict[str, Any]:
    """Write the freezing event and return its entry in result.json."""
    generator = torch.Generator().manual_seed(11)
    depth = torch.arange(shape.layers)[:, None] / max(1, shape.layers - 1)
    variance = torch.exp(torch.randn(shape.layers, shape.heads, generator=generator) + 3 * depth - 12)
    order = [divmod(int(i), shape.heads) for i in variance.flatten().argsort()]
    rejected, heads = order[1], sorted([order[0], *order[2 : round(shape.rate * shape.layers * shape.heads) + 1]])
    index = tuple(torch.tensor(heads).T)
    tensors = {name: values[index].float() for name, values in patterns(shape).items()}
    seconds = {"capture": 0.31, "statistics": 0.62, "score": 0.002, "fit": 0.41, "install": 0.05}
    event = {"update": shape.freeze_update, "heads": [list(head) for head in heads], "seconds": seconds}
    event |= {"loss_before": 3.31, "loss_after": 3.38}
    record = {
        **event, "config": config, "scores": variance.tolist(), "score_name": "variance",
        "fit_kl": [[*head, 0.01 + 0.004 * i] for i, head in enumerate(heads)],
        "rejected": [[*rejected, 0.31]], "num_sequences": 32, "length": shape.length,
    }  # fmt: skip
    append_event(folder, "freeze", record, tensors | {"row_entropy": 5 - 1e4 * variance})
    return event


def _write_evaluation(folder: Path, shape: Shape, *, cost: float) -> float:
    random = np.random.default_rng(5)
    hardness = 0.5 * random.standard_normal((shape.windows, 1))
    extra = cost * (1 + 0.5 * random.standard_normal((shape.windows, 1))) if cost else 0.0
    log_probs = -(3.1 + hardness + extra + 0.3 * random.standard_normal((shape.windows, shape.length)))
    loss = float(-log_probs.mean())
    checksum = write_losses(folder, torch.tensor(log_probs))
    record = {
        "schema": SCHEMA, "kind": "evaluation", "settings": {}, "partition": "report", "precision": "fp32",
        "provenance": {"checkpoints": {}, "data": {"report": "d" * 64}},
        "windows": shape.windows, "length": shape.length, "tokens": shape.windows * shape.length,
        "loss": loss, "perplexity": math.exp(loss), "data_fingerprint": "d" * 64,
        "windows_hash": hashlib.sha256(b"windows").hexdigest(), "log_probs_sha256": checksum,
    }  # fmt: skip
    write(folder / "evaluation.json", record)
    return loss


def write_data(folder: Path) -> Path:
    """Prepare a small data folder from a few invented words."""
    from saf.data import prepare

    words = ["the", "of", "head", "freeze", "pattern", "window", "token", "loss", "update", "rate", "layer", "model"]
    random = np.random.default_rng(0)
    (folder / "text").mkdir(parents=True)
    for number in range(40):
        (folder / "text" / f"{number}.txt").write_text(" ".join(random.choice(words, 400)))
    prepare([str(folder / "text")], folder / "data", vocab_size=300, heldout_fraction=0.3, progress=False)
    return folder / "data"
