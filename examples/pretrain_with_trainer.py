"""Pretrain a Llama by transformers' Trainer, ordinary and with a quarter of the heads frozen from the midpoint on.

    saf data prepare TEXT --tokenizer TOKENIZER --out DATA
    python examples/pretrain_with_trainer.py --data DATA --out runs/trainer

The frozen arm resumes from the ordinary arm's checkpoint at the midpoint, on the same batches. Perplexities are paired
by windows of held-out text. `OUT/trainer.json` is a result that `saf report --results` shows; copy it into a
folder of results. The default sizes are those of the recipes' small scale, 34M parameters and 75M tokens.

The initialisation affects the cost of freezing. transformers initialises all weights of a Llama with one standard
deviation. Heads of the first layer then learn to attend by content, but so diffusely that their variance is the lowest
of all. This does not happen with residual projections divided by sqrt(2 layers), as in GPT-2 and in this project's
decoder (docs/log.md).
"""

import math
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, set_seed
from transformers.trainer import Trainer
from transformers.training_args import TrainingArguments

import saf
from saf.compare import compare_evaluations
from saf.data import TokenData, calibration_windows
from saf.integrations.transformers import FreezeCallback
from saf.machine import device_name
from saf.opening import folder_hash
from saf.records.files import write_json
from saf.records.result import result_header
from saf.tasks.text import evaluate_perplexity


@dataclass(kw_only=True)
class Settings:
    """Train two arms of a small Llama by transformers' Trainer and compare them."""

    data: Path
    """Folder of `saf data prepare`."""
    out: Path
    """New folder: checkpoints of both arms, their evaluations, and trainer.json."""
    rate: float = 0.25
    """Share of heads to freeze at the midpoint."""
    updates: int = 1144
    length: int = 4096
    batch_size: int = 16
    """Sequences per update."""
    layers: int = 8
    heads: int = 8
    hidden: int = 512
    peak_lr: float = 1e-3
    calibration: int = 32
    """Number of calibration sequences."""
    windows: int = 64
    """Number of held-out windows for the comparison."""
    max_fit_kl: float = 0.2
    seed: int = 0
    scaled_init: bool = True
    """Whether initial projections onto the residual stream are divided by sqrt(2 layers)."""
    timed: bool = True
    """Whether to record the time of updates; pass --no-timed where the device is shared."""
    compile: bool = False
    """Whether the Trainer compiles the model."""


class Rows(torch.utils.data.Dataset):
    """Windows of the training text, as inputs and labels."""

    def __init__(self, data: TokenData, length: int):
        self.tokens, self.length = data.tokens("train"), length

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        """Return one window `[T]`."""
        window = torch.tensor(self.tokens[row * self.length : (row + 1) * self.length]).long()
        return {"input_ids": window, "labels": window}


class Seconds(TrainerCallback):
    """Times each update, without freezing events."""

    def __init__(self):
        self.updates: dict[int, float] = {}
        self._start = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the clock."""
        self._start = _now()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record the update's seconds."""
        self.updates[state.global_step] = _now() - self._start


def _now() -> float:
    """Return the time in seconds after all work on the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def scale_residual_(model: LlamaForCausalLM) -> None:
    """Divide the initial projections onto the residual stream by sqrt(2 layers)."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight /= math.sqrt(2 * model.config.num_hidden_layers)


def arm(settings: Settings, data: TokenData, name: str, *callbacks: TrainerCallback, resume: Path | None = None) -> Any:
    """Train and evaluate one arm; return its part of the record, and the hash of its last checkpoint."""
    set_seed(settings.seed)
    config = LlamaConfig(
        vocab_size=-(-data.vocab_size // 64) * 64,
        hidden_size=settings.hidden,
        intermediate_size=-(-8 * settings.hidden // 3 // 64) * 64,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        max_position_embeddings=settings.length,
        tie_word_embeddings=True,
    )
    folder, seconds, cuda = settings.out / name, Seconds(), torch.cuda.is_available()
    arguments = TrainingArguments(
        str(folder),
        max_steps=settings.updates,
        per_device_train_batch_size=settings.batch_size,
        learning_rate=settings.peak_lr,
        lr_scheduler_type="cosine",
        warmup_steps=settings.updates // 10,
        weight_decay=0.1,
        adam_beta2=0.95,
        bf16=cuda,
        torch_compile=settings.compile,
        save_steps=settings.updates // 2,
        logging_steps=max(1, settings.updates // 20),
        seed=settings.seed,
        report_to=[],
        use_cpu=not cuda,
    )
    model = LlamaForCausalLM(config)
    if settings.scaled_init:
        scale_residual_(model)
    trainer = Trainer(model, arguments, train_dataset=Rows(data, settings.length), callbacks=[*callbacks, seconds])
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    model_hash = folder_hash(folder / f"checkpoint-{settings.updates}")
    options = {"length": settings.length, "limit": settings.windows, "batch_size": settings.batch_size}
    evaluation = evaluate_perplexity(
        model.eval(), data, **options, out=folder / "evaluation", checkpoints={"model": model_hash}
    )
    record = {"arm": name, "perplexity": evaluation["perplexity"], "loss": evaluation["loss"]}
    if settings.timed:
        second_half = [elapsed for update, elapsed in seconds.updates.items() if update > settings.updates // 2]
        record["median update, s"] = statistics.median(second_half)
    return record, model_hash


def main(settings: Settings) -> None:
    """Train both arms, compare them, and write the record."""
    data, middle = TokenData.open(settings.data), settings.updates // 2
    ordinary, ordinary_hash = arm(settings, data, "ordinary")
    windows = calibration_windows(data, length=settings.length, count=settings.calibration, seed=settings.seed)
    config = saf.FreezeConfig(rate=settings.rate, max_fit_kl=settings.max_fit_kl)
    controller = data.tokens("controller")
    count = min(settings.calibration, len(controller) // settings.length)
    heldout = torch.tensor(controller[: count * settings.length]).long().view(count, settings.length)
    freezing = FreezeCallback(
        config, windows.split(settings.batch_size), saf.OneTime(middle), heldout=heldout.split(settings.batch_size)
    )
    midpoint = settings.out / "ordinary" / f"checkpoint-{middle}"
    frozen, frozen_hash = arm(settings, data, "frozen", freezing, resume=midpoint)
    (event,) = freezing.events
    speed = {}
    if settings.timed:
        speed["update, ordinary / frozen"] = ordinary["median update, s"] / frozen["median update, s"]
    change = compare_evaluations(settings.out / "ordinary/evaluation", settings.out / "frozen/evaluation")
    header = result_header(
        "trainer",
        {**asdict(settings), "data": settings.data.name, "out": settings.out.name},  # names, no local paths
        device=device_name(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        checkpoints={"parent": folder_hash(midpoint), "ordinary": ordinary_hash, "frozen": frozen_hash},
        data={"train": data.fingerprint, "report": data.fingerprint},
    )
    record = {
        **header,
        "updates": settings.updates,
        "tokens": settings.updates * settings.batch_size * settings.length,
        "heads": settings.layers * settings.heads,
        "frozen heads": len(event.heads),
        "frozen after update": event.update,
        "heads frozen": event.heads,
        "held-out loss before and after freezing": [event.values["loss_before"], event.values["loss_after"]],
        "freezing, s": sum(event.seconds.values()),
        "compiled": settings.compile,
        "change of perplexity, %": change["delta_ppl_percent"],
        "95% interval, %": change["ci95"],
        "paired windows": change["windows"],
        **speed,
        "arms": [ordinary, frozen],
    }
    write_json(settings.out / "trainer.json", record)
    low, high = change["ci95"]
    before, after = record["held-out loss before and after freezing"]
    print(f"{len(event.heads)} of {record['heads']} heads frozen after update {event.update}: ", end="")
    print(f"held-out loss {before:.3f} -> {after:.3f}")
    print(f"perplexity {change['ppl_ordinary']:.3f} -> {change['ppl_frozen']:.3f}: ", end="")
    print(f"{change['delta_ppl_percent']:+.3f}% (95% interval {low:+.3f} to {high:+.3f})")
    timed = "".join(f"update {ratio:.3f}x; " for ratio in speed.values())
    print(f"{timed}{settings.out / 'trainer.json'}")


if __name__ == "__main__":
    main(tyro.cli(Settings))
