"""The settings of freezing heads of a model on disk, whoever made the model."""

from dataclasses import dataclass
from pathlib import Path

from saf.errors import CheckpointError, InputError
from saf.freeze_config import FreezeConfig
from saf.loss_guard import GUARD_SEQUENCES
from saf.machine import Device, Precision

HELDOUT_SEQUENCES = 32
"""Held-out sequences that a score reads where no number is asked for."""


@dataclass(frozen=True, kw_only=True)
class CheckpointFreezing:
    """Say which checkpoint's heads are frozen, how, on what text, and where the new checkpoint goes."""

    checkpoint: Path
    """Checkpoint (step-N), run (its newest checkpoint), or Hugging Face model (its folder, or its name on the hub)."""
    config: FreezeConfig
    """These settings say how heads are frozen."""
    out: Path
    """Write the new checkpoint, or the model's folder, here; events.jsonl in it records the event."""
    data: Path | None = None
    """Read this folder made by `saf data prepare`, or, for a Hugging Face model, a file of text; None takes the data
    that the checkpoint was trained on. A folder's tokenizer must be the model's (`saf data prepare --tokenizer
    MODEL`)."""
    bos: bool = False
    """Begin each sequence with the beginning-of-text token (BOS) of a Hugging Face model's tokenizer."""
    sequences: int = 32
    """Number of calibration sequences."""
    length: int | None = None
    """Length of calibration sequences in tokens; None takes the run's, or all that a Hugging Face model takes."""
    allow_shorter: bool = False
    """Accept a shorter length than the model takes; the frozen model then refuses longer inputs."""
    batch_size: int = 8
    """Number of sequences in a forward pass."""
    heldout_sequences: int | None = None
    """Number of controller sequences for the loss before and after, and for scores of head outputs; None takes 32 for
    such a score, otherwise up to 8."""
    accept_loss: bool = False
    """Write the model even where its held-out perplexity rises by more than 5%."""
    heal: int | None = None
    """Train a Hugging Face model on this number of tokens afterwards, beside the ordinary model trained alike: the
    cost of the heads is reported against that. None trains nothing."""
    calibration_seed: int | None = None
    """Random seed for the choice of calibration sequences; None takes the run's, or 0."""
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

    def heldout_count(self, available: int) -> int:
        """Return how many held-out sequences to read, of so many available: one at least."""
        if self.heldout_sequences is not None or "outputs" in self.config.needs or self.config.jointly:
            return self.heldout_sequences or HELDOUT_SEQUENCES
        return max(1, min(GUARD_SEQUENCES, available))


def check_new(settings: CheckpointFreezing) -> None:
    """Raise CheckpointError where something is at the place of what is to be written."""
    if settings.out.exists():
        raise CheckpointError(f"{settings.out} exists already; remove it, or write to another folder")


def check_length(settings: CheckpointFreezing, longest: int, whose: str, *, most: int) -> int:
    """Return the length of calibration sequences.

    Raises InputError for one that is not all of `longest`, unmeant, and for more than the model takes, `most`.
    """
    length = longest if settings.length is None else settings.length
    if length > most:
        raise InputError(f"calibration sequences of {length} tokens are longer than the model's maximum of {most}")
    if length < longest and not settings.allow_shorter:
        raise InputError(
            f"patterns of {length} tokens do not cover the {longest} tokens {whose}; leave length out, or set "
            "allow_shorter to have a model that takes no longer input"
        )
    return length
