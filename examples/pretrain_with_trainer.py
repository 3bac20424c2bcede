"""Pretrain a Llama of transformers by its Trainer, with a quarter of the heads frozen from the midpoint on and without.

    saf data prepare TEXT --tokenizer TOKENIZER --out DATA
    python examples/pretrain_with_trainer.py --data DATA --out runs/trainer

Both arms are the same training up to the midpoint: the frozen one goes on from the ordinary one's checkpoint there, on
the same batches. What freezing cost is paired window by window of held-out text. `OUT/trainer.json` is a result that
`saf report --results` shows; copy it into a folder of results. The sizes below are those of the recipes' small scale,
34M parameters and 75M tokens.

What a Llama is drawn from decides what freezing costs it: transformers draws every weight alike, and the first layer
then learns to gather words by what they say, spread so thinly that their variance is the lowest of all. With residual
projections drawn smaller by sqrt(2 layers), as GPT-2's and this project's decoder are, it does not (docs/log.md).
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
    """Folder made by `saf data prepare`."""
    out: Path
    """New folder: checkpoints of both arms, their evaluations, and trainer.json."""
    rate: float = 0.25
    """Share of heads to freeze at the midpoint."""
    updates: int = 1144
    length: int = 4096
    batch_size: int = 16
    """Sequences of an update."""
    layers: int = 8
    heads: int = 8
    hidden: int = 512
    peak_lr: float = 1e-3
    calibration: int = 32
    """Sequences to measure heads on."""
    windows: int = 64
    """Held-out windows that both arms are compared on."""
    max_fit_kl: float = 0.2
    seed: int = 0
    scaled_init: bool = True
    """Whether projections onto the residual stream are drawn smaller by sqrt(2 layers); transformers does not."""
    timed: bool = True
    """Whether the record has the time of updates; not where other work shares the device."""
    compile: bool = False
    """Whether the Trainer compiles the model."""


class Rows(torch.utils.data.Dataset):
    """Windows of the training text, each its own labels."""

    def __init__(self, data: TokenData, length: int):
        self.tokens, self.length = data.tokens("train"), length

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        """Return one window `[T]`."""
        window = torch.tensor(self.tokens[row * self.length : (row + 1) * self.length]).long()
        return {"input_ids": window, "labels": window}


class Seconds(TrainerCallback):
    """Time each update, without the events before it."""

    def __init__(self):
        self.updates: dict[int, float] = {}
        self._start = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the clock."""
        self._start = _now()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Keep what the update took."""
        self.updates[state.global_step] = _now() - self._start


def _now() -> float:
    """Return the clock once the device is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def scale_residual_(model: LlamaForCausalLM) -> None:
    """Divide the projections onto the residual stream, as they were drawn, by sqrt(2 layers)."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight /= math.sqrt(2 * model.config.num_hidden_layers)


def arm(settings: Settings, data: TokenData, name: str, *callbacks: TrainerCallback, resume: Path | None = None) -> Any:
    """Train one arm and evaluate it; return what the record says of it, and the hash of its last checkpoint."""
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
    judged = {"length": settings.length, "limit": settings.windows, "batch_size": settings.batch_size}
    found = evaluate_perplexity(
        model.eval(), data, **judged, out=folder / "evaluation", checkpoints={"model": model_hash}
    )
    told = {"perplexity": found["perplexity"], "loss": found["loss"]}
    if settings.timed:
        late = [took for update, took in seconds.updates.items() if update > settings.updates // 2]
        told["median update, s"] = statistics.median(late)
    return {"arm": name, **told}, model_hash


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
    head = result_header(
        "trainer",
        {**asdict(settings), "data": settings.data.name, "out": settings.out.name},  # by name, wherever they lie
        device=device_name(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        checkpoints={"parent": folder_hash(midpoint), "ordinary": ordinary_hash, "frozen": frozen_hash},
        data={"train": data.fingerprint, "report": data.fingerprint},
    )
    record = {
        **head,
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
