"""`saf pretrain`: train one arm, ordinary or frozen."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from saf.cli.options import Float, Folder, FreezeOptions, Int, Moment, Name, changed, optional
from saf.cli.output import show
from saf.errors import InputError
from saf.records.table import Table

if TYPE_CHECKING:
    from saf.train import TrainConfig


@dataclass(kw_only=True)
class Pretrain:
    """Train a model, or one arm from another run's checkpoint, in a folder of its own.

    Settings left out take the default in brackets, or with --parent the parent run's value.
    Exit code 75: a signal stopped the run after a checkpoint; go on with --resume.
    """

    out: Path
    """Folder of the run."""
    data: Folder = None
    """Folder made by `saf data`; needed for a new run."""
    resume: bool = False
    """Go on from the newest checkpoint in --out, with the run's own settings."""
    parent: Folder = None
    """Start from this checkpoint folder of another run."""
    model: Name = None
    """Preset: tiny, 124m, 774m, 1b (tiny)."""
    model_overrides: dict[str, str] = field(default_factory=dict)
    """Fields of the preset to change, as name value pairs: num_layers 2 position learned."""
    length: Int = None
    """Context in tokens (the preset's longest)."""
    batch_size: Int = None
    """Windows of one micro-batch (8)."""
    accumulation: Int = None
    """Micro-batches of one update (1)."""
    updates: Int = None
    """Updates of the whole schedule (1000)."""
    peak_lr: Float = None
    """Learning rate after the warm-up (6e-4)."""
    min_lr_ratio: Float = None
    """Last learning rate as a share of the peak (0.1)."""
    warmup: Moment = None
    """Warm-up, in updates or as a share of the schedule (0.1)."""
    lr_by: Annotated[Literal["update", "elapsed"] | None, optional("update|elapsed")] = None
    """Advance the learning rate by updates or by time (update)."""
    lr_start: Int = None
    """Update at which the learning-rate schedule begins (0)."""
    time_budget_seconds: Float = None
    """With --lr-by elapsed: stop before an update that would exceed this."""
    betas: Annotated[tuple[float, float] | None, optional("FLOAT FLOAT")] = None
    """AdamW's averaging coefficients (0.9 0.95)."""
    weight_decay: Float = None
    """Of matrices (0.1)."""
    clip: Float = None
    """Largest gradient norm (1.0)."""
    seed: Int = None
    """Of initial weights and data order (1337)."""
    sampler: Annotated[Literal["shuffled", "random"] | None, optional("shuffled|random")] = None
    """Non-overlapping windows in shuffled order, or windows starting anywhere (shuffled)."""
    device: Annotated[Literal["auto", "cpu", "cuda"] | None, optional("auto|cpu|cuda")] = None
    """Where to train (auto)."""
    precision: Annotated[Literal["auto", "fp32", "bf16"] | None, optional("auto|fp32|bf16")] = None
    """auto is bf16 autocast on CUDA and fp32 on CPU."""
    compile: Annotated[Literal["auto", "on", "off"] | None, optional("auto|on|off")] = None
    """torch.compile the model; auto is on for CUDA."""
    kernel: Name = None
    """Attention kernel of live heads: cudnn, flash, efficient, math, fa3 or fa4 where installed (PyTorch's choice)."""
    freeze: FreezeOptions = field(default_factory=FreezeOptions)
    """How heads are frozen; nothing is frozen without a rate, a count or heads."""
    freeze_at: Moment = None
    """When: an update or a share of the schedule (0.5; with --parent, right at the parent's update)."""
    calibration_sequences: Int = None
    """Windows to calibrate on (32)."""
    calibration_source: Annotated[
        Literal["auto", "calibration", "train"] | None, optional("auto|calibration|train")
    ] = None
    """Partition to calibrate on (auto)."""
    heldout_sequences: Int = None
    """Windows of the controller partition that output-aware scores read (32)."""
    track_gradients: bool = False
    """Keep the average that gradient scores read, so that runs which continue from this one can freeze by them."""
    eval_every: Int = None
    """Updates between controller evaluations, 0 for none (250)."""
    eval_windows: Int = None
    """Windows of a controller evaluation (32)."""
    save_every: Int = None
    """Updates between checkpoints, 0 for none but those at the freezing point and the end (500)."""
    keep: Int = None
    """Newest checkpoints to keep beside the one at the freezing point, 0 for all (2)."""
    log_every: Int = None
    """Updates between progress lines without a terminal (10)."""
    tensorboard: bool = True
    """Write TensorBoard events."""
    quiet: bool = False
    """Show no progress."""
    json: bool = False
    """Print the result as JSON instead of a table."""

    def run(self) -> dict[str, Any]:
        """Train, print the result and return it; exits with code 75 when a signal stopped the run."""
        from saf.train import EXIT_STOPPED, pretrain

        result = pretrain(self.config(), resume=self.resume)
        if "stopped_at" in result:
            print(
                f"stopped after update {result['stopped_at']}; checkpoint {result['checkpoint']}. "
                f"Go on with: saf pretrain --out {self.out} --resume",
                file=sys.stderr,
            )
            raise SystemExit(EXIT_STOPPED)
        show(result, _table(result), as_json=self.json)
        return result

    def config(self) -> "TrainConfig":
        """Return the run's settings from the options, the parent, or the run to resume."""
        from saf.train import TrainConfig, continue_from
        from saf.train.config import recorded_config

        given = self._given()
        if self.resume and (self.out / "config.json").exists():
            recorded = recorded_config(self.out).to_dict()
            if self.parent is not None and not _same(self.parent, recorded["parent"]):
                given["parent"] = str(self.parent)
            return TrainConfig.from_dict({**recorded, **given, "out": str(self.out)})
        if self.parent is not None:
            return continue_from(self.parent, out=self.out, **given)
        if self.data is None:
            if self.resume:
                raise InputError(f"{self.out} holds no run to resume; check --out, or start a new run with --data")
            raise InputError("a new run needs --data, a folder made by `saf data`")
        return TrainConfig(**given, out=str(self.out))

    def _given(self) -> dict[str, Any]:
        """Return the settings that were given on the command line."""
        apart = {"out", "resume", "parent", "freeze", "json", "model_overrides"}
        given = {name: value for name, value in changed(self).items() if name not in apart}
        if (moment := given.pop("freeze_at", None)) is not None:
            from saf.schedules import OneTime

            given["schedule"] = OneTime(at=moment)
        if self.data is not None:
            given["data"] = str(self.data)
        if self.model_overrides:
            given["model_overrides"] = {name: _number(text) for name, text in self.model_overrides.items()}
        if freeze := self.freeze.given():
            given["freeze"] = self._freeze_config(freeze)
        return given

    def _freeze_config(self, options: dict[str, Any]) -> Any:
        from saf.freezing.config import FreezeConfig

        if not options.keys() & {"rate", "count", "heads"}:
            raise InputError(f"--freeze.{next(iter(options)).replace('_', '-')} needs --freeze.rate beside it")
        return FreezeConfig(**options)


COMMAND = Pretrain


def _same(path: Path, recorded: str | None) -> bool:
    return recorded is not None and path.resolve() == Path(recorded).resolve()


def _number(text: str) -> int | str:
    return int(text) if text.lstrip("-").isdigit() else text


def _table(result: dict[str, Any]) -> Table:
    timing, event = result["update_seconds"], result["intervention"] or {}
    rows = {
        "perplexity, report": f"{result['report_perplexity']:.4f}",
        "loss, report": f"{result['report_loss']:.5f} nats per token",
        "unigram entropy": f"{result['unigram_entropy']:.4f} nats",
        "loss, training": result["train_loss"] and f"{result['train_loss']:.4f} nats per token",
        "update, median": timing
        and f"{timing['median']:.4f} s (updates {timing['first_update']} to {timing['last_update']})",
        "peak memory": result["peak_memory_bytes"] and f"{result['peak_memory_bytes'] / 2**30:.2f} GiB",
        "training": f"{result['total_seconds']:.1f} s",
    }
    if event:
        more, in_all = len(event["heads"]), len(result["provenance"]["heads"])
        rows["heads frozen"] = f"{more} after update {event['update']:,}"
        if in_all > more:
            rows["heads frozen"] = f"{more} more after update {event['update']:,}, {in_all} in all"
        if result["trainable_pattern_parameters"]:
            rows["pattern parameters"] = f"{result['trainable_pattern_parameters']:,} trained"
        rows["intervention"] = f"{sum(event['seconds'].values()):.2f} s"
    if event.get("loss_before") is not None:
        rows["controller loss"] = f"{event['loss_before']:.4f} before, {event['loss_after']:.4f} after freezing"
    rows["checkpoint"] = result["checkpoint"]
    return Table.facts(f"{result['arm']} arm, {result['updates']:,} updates, {result['tokens']:,} tokens", rows)
