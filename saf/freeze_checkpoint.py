"""Freezing heads of a model on disk: the settings, and the whole recipe from a checkpoint's data to a new checkpoint.

The recipe for folders of transformers is in saf/hf/folders.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from saf.calibration import plan_calibration
from saf.checkpoint import save_checkpoint
from saf.data import TextData, calibration_windows, check_separate
from saf.errors import CheckpointError, InputError
from saf.freeze_config import FreezeConfig
from saf.freeze_report import FreezeReport
from saf.freezing import freeze_
from saf.heldout import GUARD_SEQUENCES
from saf.machine import Device, Precision, autocast, pick_device
from saf.opening import ModelFolder, find_model
from saf.surgery import finalize_
from saf.tasks.base import Progress
from saf.tasks.text import heldout_batches
from saf.train.run import with_freeze
from saf.train.start import recorded_gradient

HELDOUT_SEQUENCES = 32
"""Held-out sequences of scores and joint cost by default."""
CPU_TOKENS = 8192
"""Most held-out tokens of joint cost by default on a CPU, where every candidate's pass over half of them takes long."""
Countdown = Callable[[str, str], Progress]
"""Returns a counter for a part of the work, from its verb and its items: ("calibrating", "layers")."""


@dataclass(frozen=True, kw_only=True)
class CheckpointFreezing:
    """Say which checkpoint's heads are frozen, how, on what text, and where the new checkpoint goes."""

    checkpoint: Path
    """Checkpoint (step-N), run (its newest checkpoint), or Hugging Face model (its folder, or its name on the hub)."""
    config: FreezeConfig
    """These settings say how heads are frozen."""
    out: Path
    """Write the new checkpoint or model into this folder."""
    data: Path | None = None
    """Read this file of text (of a Hugging Face model), or folder made by `saf data prepare` with the model's
    tokenizer (--tokenizer MODEL); by default the data that a checkpoint was trained on."""
    bos: bool = False
    """Begin each sequence with the beginning-of-text token (BOS) of a Hugging Face model's tokenizer."""
    sequences: int = 32
    """Calibrate on this number of sequences."""
    length: int | None = None
    """Calibrate on sequences of this many tokens; by default of the run's length, or all that the model takes. The
    frozen model refuses longer inputs."""
    batch_size: int = 8
    """Run this number of sequences in a forward pass."""
    heldout_sequences: int | None = None
    """Measure the loss before and after, joint cost, and scores of head outputs on this number of held-out sequences:
    by default at most 8, for such a score or joint cost 32 (joint cost on a CPU: at most 8,192 tokens). With joint cost
    half of them choose the heads, and the other half measure the loss."""
    accept_loss: bool = False
    """Write the model even where its held-out perplexity rises by more than 5%."""
    heal: int | None = None
    """Train the frozen Hugging Face model on this number of tokens, and the ordinary one alike, and report the cost of
    the heads against that."""
    calibration_seed: int | None = None
    """Choose calibration sequences by this random seed; by default the run's, or 0."""
    capture_gb: float | None = None
    """Keep at most this many GB of queries and keys at once; None takes half of the free memory."""
    finalize: bool = False
    """Drop the removed query and key rows: the checkpoint is smaller, and freezing cannot be undone."""
    device: Device = "auto"
    """Compute on this device; auto is CUDA if there is one."""
    precision: Precision = "auto"
    """Compute in this precision; auto is bf16 autocast on CUDA, and fp32 on CPU. Weights in 16 bits run in their own
    dtype; fp32 refuses them."""

    def __post_init__(self):
        """Raise InputError naming the first field that cannot be used."""
        for name in ("sequences", "length", "batch_size", "heldout_sequences", "heal"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise InputError(f"{name} must be at least 1, got {value}")

    def calibration_length(self, longest: int, *, most: int) -> int:
        """Return the length of calibration sequences, `longest` by default; raise InputError for more than `most`."""
        length = longest if self.length is None else self.length
        if length > most:
            raise InputError(f"length must be at most the {most} tokens that the model takes, got {length}")
        return length

    def heldout_count(self, available: int, length: int) -> int:
        """Return how many held-out sequences of `length` tokens to read, of so many available: one at least."""
        if self.heldout_sequences is not None or "outputs" in self.config.needs:
            return self.heldout_sequences or HELDOUT_SEQUENCES
        if self.config.jointly:
            few = pick_device(self.device).type == "cpu"
            return min(HELDOUT_SEQUENCES, max(2, CPU_TOKENS // length)) if few else HELDOUT_SEQUENCES
        return max(1, min(GUARD_SEQUENCES, available))


def check_new(settings: CheckpointFreezing) -> None:
    """Raise CheckpointError where something is at the place of what is to be written."""
    if settings.out.exists():
        raise CheckpointError(f"{settings.out} exists already; remove it, or write to another folder")


def freeze_checkpoint(
    settings: CheckpointFreezing, *, say: Callable[[str], Any], countdown: Countdown
) -> tuple[FreezeReport, str, str]:
    """Freeze heads of a checkpoint and write a new one; return the report, the new hash, and the checkpoint's hash.

    The optimiser's state is carried along. `say` is called with lines for people, `countdown` for each part that takes
    long. Raises CheckpointError for a damaged checkpoint, or where `out` exists, InputError without a checkpoint or for
    settings that it cannot be frozen with.
    """
    if settings.heal is not None:
        raise InputError("heal is of models of transformers: go on from the new checkpoint by `saf pretrain --parent`")
    if settings.bos:
        raise InputError("bos is of models of transformers; those of this project are trained without such a token")
    source = find_model(settings.checkpoint, optimizer=True)
    if (checkpoint := source.checkpoint) is None:
        raise InputError(
            f"{settings.checkpoint} must be a checkpoint, got a model without optimiser state: freeze it in Python by "
            "saf.freeze_"
        )
    check_new(settings)
    batches, heldout = _batches(settings, source)
    model = checkpoint.model(pick_device(settings.device))
    optimizer = checkpoint.optimizer(model)
    options: dict[str, Any] = {"optimizer": optimizer, "accept_loss": settings.accept_loss}
    if "gradient" in settings.config.needs:
        if (gradient := recorded_gradient(model, checkpoint.state)) is None:
            raise InputError(
                f"{checkpoint.path} must hold an average of Q/K gradients for this score: train its run with "
                "--track-gradients, or choose another score"
            )
        options["score_inputs"] = {"gradient": gradient}
    report = freeze_opened(settings, model, batches, heldout, say=say, countdown=countdown, **options)
    if settings.finalize:
        finalize_(model)
    state = {key: value for key, value in checkpoint.state.items() if key != "optimizer_groups"}
    state["elapsed"] = with_freeze(checkpoint.state["elapsed"], sum(report.seconds.values()))
    written = save_checkpoint(
        settings.out,
        model,
        optimizer,
        state=state,
        parent=checkpoint.hash,
        record=lambda folder: report.save(folder, update=checkpoint.update),
    )
    return report, written, checkpoint.hash


def freeze_opened(
    settings: CheckpointFreezing,
    model: nn.Module,
    batches: list[Tensor],
    heldout: list[Tensor],
    *,
    say: Callable[[str], Any],
    countdown: Countdown,
    **options: Any,
) -> FreezeReport:
    """Freeze heads of an open model as the settings and the `options` of `freeze_` say, after a line about memory."""
    config, limit = settings.config, None if settings.capture_gb is None else int(1e9 * settings.capture_gb)
    with autocast(pick_device(settings.device), settings.precision):
        say(str(plan_calibration(model, batches, collect=config.collect, capture_bytes=limit)))
        options |= {"progress": countdown("calibrating", "layers"), "joint_progress": countdown("measuring", "heads")}
        return freeze_(model, batches, config, heldout=heldout, capture_bytes=limit, **options)


def _batches(settings: CheckpointFreezing, source: ModelFolder) -> tuple[list[Tensor], list[Tensor]]:
    """Return calibration sequences and held-out ones, in batches `[B, length]`.

    Raises DataError where the event would read text on which the run is reported.
    """
    data, most = source.data(settings.data), source.state["model"]["max_length"]
    if isinstance(data, TextData):
        raise InputError(f"data of a checkpoint must be a folder by `saf data prepare`, got {data.folder}")
    length = settings.calibration_length(source.settings.get("length") or most, most=most)
    trained = source.training_data() if data.fingerprint != source.state.get("data_fingerprint") else None
    if trained is not None:
        check_separate(data, data.calibration_source, trained)
        if "outputs" in settings.config.needs or settings.config.jointly:
            check_separate(data, "controller", trained)
    seed = source.settings.get("seed", 0) if settings.calibration_seed is None else settings.calibration_seed
    windows = calibration_windows(data, length=length, count=settings.sequences, seed=seed)
    size, count = settings.batch_size, settings.heldout_count((data.num_tokens("controller") - 1) // length, length)
    return list(windows.split(size)), heldout_batches(data, length=length, count=count, batch_size=size)
