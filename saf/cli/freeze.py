"""`saf freeze`: the whole recipe on a checkpoint."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

import tyro
from torch import Tensor

from saf.calibration import collection_bytes, heads_at_a_time, plan_calibration
from saf.calibration.plan import readable
from saf.cli.command import FLAT, Command, build, given_values
from saf.cli.layer_progress import LayerProgress
from saf.cli.output import show
from saf.data import TokenData, calibration_windows
from saf.data.token_data import check_separate
from saf.errors import CheckpointError, InputError
from saf.estimates import collect_for
from saf.freezing.choice import scores_collect
from saf.freezing.config import FreezeConfig
from saf.freezing.recipe import freeze_
from saf.machine.execution import Device, Precision, autocast, pick_device
from saf.models import GPT
from saf.opening import ModelFolder, find_model, open_data, trained_data
from saf.surgery import finalize_
from saf.tasks.text import heldout_batches
from saf.train.checkpoint import Checkpoint, save_checkpoint
from saf.train.events import recorded_gradient

BUDGETS = ("rate", "count", "heads")
"""Settings that say how many heads are frozen, one of which is given."""


@dataclass(kw_only=True)
class Freeze(Command):
    """Calibrate, choose, fit and install frozen heads in a checkpoint, and write the result as a new checkpoint.

    The optimiser's state is carried along, so `saf pretrain --parent OUT` continues from there.
    """

    checkpoint: Annotated[Path, tyro.conf.Positional]
    """A checkpoint (step-N); a run means its newest one."""
    config: Annotated[FreezeConfig, FLAT]
    """How heads are frozen."""
    out: Path
    """The new checkpoint; the event is recorded beside its files, in events.jsonl."""
    data: Path | None = None
    """Folder made by `saf data prepare`; the one it was trained on when None."""
    sequences: int = 32
    """Calibration sequences."""
    length: int | None = None
    """Their length in tokens; the run's when None."""
    allow_shorter: bool = False
    """Accept a length below the run's; the model then takes no longer input."""
    batch_size: int = 8
    """Sequences in a forward pass."""
    heldout_sequences: int = 32
    """Sequences of the controller partition that output-aware scores read."""
    calibration_seed: int | None = None
    """Of the choice of calibration sequences; the run's when None."""
    calibration: Path | None = None
    """Keep each layer's measurement in this folder once it is finished, and go on from those found there."""
    capture_gb: float | None = None
    """Most memory for queries and keys kept at once, GB; half of what is free when None."""
    finalize: bool = False
    """Forget the removed query and key rows: a smaller checkpoint that cannot be undone."""
    device: Device = "auto"
    """Where to compute; auto is CUDA if there is one."""
    precision: Precision = "auto"
    """auto is bf16 autocast over float32 weights on CUDA, and fp32 on CPU."""
    json: bool = False
    """Print JSON instead of a table."""

    @classmethod
    def from_words(cls, words: Sequence[str], *, prog: str | None = None) -> Self:
        """Return the command; raise InputError where words say in two ways how many heads are frozen."""
        given = given_values(cls, words, prog=prog)
        check_budget(given.get("config", {}))
        return build(cls, given)

    def run(self) -> dict[str, Any]:
        """Freeze, write the checkpoint, show and return the report with the checkpoint's hash."""
        config, checkpoint = self.config, self._open()
        device = pick_device(self.device)
        batches, heldout = self._batches(checkpoint, config)
        model = checkpoint.model(device)
        optimizer = checkpoint.optimizer(model)
        needed = self._needed(checkpoint, model, config)
        limit = None if self.capture_gb is None else int(1e9 * self.capture_gb)
        with autocast(device, self.precision), LayerProgress() as progress:
            for plan in _plans(model, batches, config, needed, limit):
                progress.say(plan)
            report = freeze_(
                model,
                batches,
                config,
                optimizer=optimizer,
                heldout=heldout,
                needed=needed,
                folder=self.calibration,
                capture_bytes=limit,
                progress=progress,
            )
        if self.finalize:
            finalize_(model)
        state = {key: value for key, value in checkpoint.state.items() if key != "optimizer_groups"}
        written = save_checkpoint(self.out, model, optimizer, state=state, parent=checkpoint.hash)
        report.save(self.out, update=checkpoint.update)
        result = {"checkpoint": str(self.out), "hash": written, "parent": checkpoint.hash, **report.to_dict()}
        show(result, report.table(), f"checkpoint {self.out}", f"hash {written}", as_json=self.json)
        return result

    def _open(self) -> Checkpoint:
        source = find_model(self.checkpoint, optimizer=True)
        if source.checkpoint is None:
            raise InputError(
                f"{self.checkpoint} is no checkpoint: it has no optimiser state; in Python use saf.freeze_"
            )
        if self.out.exists():
            raise CheckpointError(f"{self.out} exists already; remove it, or write to another folder")
        return source.checkpoint

    def _needed(self, checkpoint: Checkpoint, model: GPT, config: FreezeConfig) -> dict[str, Any]:
        if "gradient" not in config.needs:
            return {}
        gradient = recorded_gradient(model, checkpoint.state)
        if gradient is None:
            raise InputError(
                f"{checkpoint.path} holds no average of Q/K gradients, which this score reads; "
                "train its run with --track-gradients, or choose another score"
            )
        return {"gradient": gradient}

    def _check_separate(self, data: TokenData, source: ModelFolder, config: FreezeConfig) -> None:
        """Keep what the event reads apart from the text on which the run is reported, where that is visible."""
        trained = trained_data(source) if data.fingerprint != source.state.get("data_fingerprint") else None
        if trained is None:
            return
        check_separate(data, data.calibration_source, trained)
        if "outputs" in config.needs:
            check_separate(data, "controller", trained)

    def _batches(self, checkpoint: Checkpoint, config: FreezeConfig) -> tuple[list[Tensor], list[Tensor] | None]:
        settings = checkpoint.state.get("settings") or {}
        source = ModelFolder(checkpoint.path, checkpoint)
        data = open_data(self.data, source)
        trained = settings.get("length") or checkpoint.state["model"]["max_length"]
        length = trained if self.length is None else self.length
        if length < trained and not self.allow_shorter:
            raise InputError(
                f"patterns of {length} tokens do not cover the {trained} tokens that the model was trained on; leave "
                "--length out, or pass --allow-shorter to have a model that takes no longer input"
            )
        self._check_separate(data, source, config)
        seed = settings.get("seed", 0) if self.calibration_seed is None else self.calibration_seed
        windows = calibration_windows(data, length=length, count=self.sequences, seed=seed, setting="--sequences")
        heldout = None
        if "outputs" in config.needs:
            count, size = self.heldout_sequences, self.batch_size
            heldout = heldout_batches(data, length=length, count=count, batch_size=size)
        return list(windows.split(self.batch_size)), heldout


def check_budget(given: Mapping[str, Any]) -> None:
    """Raise InputError when more than one of the settings given says how many heads are frozen."""
    if len(budgets := [name for name in BUDGETS if name in given]) > 1:
        raise InputError(f"give either a rate, a count or the heads to freeze; got {' and '.join(budgets)}")


def _plans(
    model: GPT, batches: list[Tensor], config: FreezeConfig, needed: dict[str, Any], limit: int | None
) -> Iterator[str]:
    """Yield what is held at once: by the calibration, and by a second one when the pattern reads more of its heads."""
    plan = plan_calibration(model, batches, collect=scores_collect(config, needed), capture_bytes=limit)
    yield str(plan)
    if not (names := collect_for(config.pattern, config.storage)):
        return
    shape = {"sequences": plan.sequences, "length": plan.length}
    together = min(heads_at_a_time(model, names, **shape), len(plan.heads))
    kept = readable(collection_bytes(names, heads=together, **shape))
    yield f"for the patterns, {', '.join(names)} of the heads chosen, up to {together} at a time: {kept} on the CPU"


COMMAND = Freeze
