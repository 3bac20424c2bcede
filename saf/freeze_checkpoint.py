"""`freeze_saved` freezes heads of a model on disk: from its files and its data to the files of a new model.

`open_checkpoint_source` opens checkpoints of this project for it, saf/hf/folders.py folders of transformers.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from saf.calibration import plan_calibration
from saf.checkpoint import save_checkpoint
from saf.data import TextData, TokenData, calibration_windows, check_separate
from saf.errors import CheckpointError, InputError
from saf.freeze_config import FreezeConfig
from saf.freeze_report import FreezeReport
from saf.freezing import freeze_
from saf.healing import Healing
from saf.heldout import GUARD_SEQUENCES
from saf.libraries import transformers_part
from saf.machine import Device, Precision, autocast, pick_device
from saf.opening import ModelFolder, find_model
from saf.records.run import is_transformers_model
from saf.surgery import finalize_
from saf.tasks.base import Progress
from saf.tasks.text import heldout_windows
from saf.train.start import recorded_gradient

HELDOUT_SEQUENCES = 32  # of scores and joint cost by default
# Most held-out tokens of joint cost by default on a CPU, where every candidate's pass over half of them takes long.
# Fewer choose heads that fit them alone: of SmolLM2-135M, 2,048 tokens chose some that lower perplexity there and raise
# it by 3.4% elsewhere (docs/log.md).
CPU_TOKENS = 8192


@dataclass(frozen=True, kw_only=True)
class CheckpointFreezing:
    """Say which checkpoint's heads are frozen, how, on what text, and where the new checkpoint goes."""

    checkpoint: Path  # `saf freeze` describes these two, where it says how they are read
    config: FreezeConfig
    out: Path
    """Write the new checkpoint or model into this folder."""
    data: Path | None = None
    """Read this file of text (of a Hugging Face model), or folder written by `saf data prepare` with the model's
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
        if self.config.budget is not None and self.config.budget >= 1:  # 100%: whoever writes 1 means 1%
            raise InputError(f"budget must be a share below 1, such as 0.01 or 1%, got {self.config.budget:g}")

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
        if self.config.uses_joint_cost:
            on_cpu = pick_device(self.device).type == "cpu"
            return min(HELDOUT_SEQUENCES, max(2, CPU_TOKENS // length)) if on_cpu else HELDOUT_SEQUENCES
        return max(1, min(GUARD_SEQUENCES, available))


@dataclass(frozen=True, kw_only=True)
class FreezingSource:
    """An open model whose heads are to be frozen, with its text."""

    model: nn.Module
    hash: str  # of its files
    calibration: Tensor  # sequences `[N, length]`
    heldout: Tensor  # sequences `[N, length]` that measure the loss and joint cost
    write: Callable[[FreezeReport], str]  # writes the frozen model into `out` and returns its hash
    options: dict[str, Any] = field(default_factory=dict)  # further ones of `freeze_`
    # Trains the frozen model, and compares it on these held-out batches with the ordinary one trained alike.
    heal: Callable[[list[Tensor], Progress], Healing] | None = None


def freeze_saved(
    settings: CheckpointFreezing,
    *,
    say: Callable[[str], Any],
    new_progress: Callable[[str, str], Progress],
) -> tuple[FreezeReport, str, str]:
    """Freeze heads of a model on disk and write a new one; return the report, the new hash, and the old one.

    `say` takes lines for people. `new_progress` returns the progress of a part that takes long, from its verb and its
    items: ("calibrating", "layers").

    Raises:
        CheckpointError: The model's files are damaged, or `out` exists.
        InputError: There is no model, or the settings do not fit it.
        UnsupportedError: The model is of an unsupported family.
    """
    if settings.out.exists():
        raise CheckpointError(f"{settings.out} exists already; remove it, or write to another folder")
    of_transformers = is_transformers_model(settings.checkpoint)
    source = (transformers_part("freezing") if of_transformers else open_checkpoint_source)(settings, say)
    batches = list(source.calibration.split(settings.batch_size))
    heldout = list(source.heldout.split(settings.batch_size))
    with autocast(pick_device(settings.device), settings.precision):
        say(str(plan_calibration(source.model, batches, collect=settings.config.collect)))
        report = freeze_(
            source.model,
            batches,
            settings.config,
            heldout=heldout,
            accept_loss=settings.accept_loss or settings.heal is not None,  # healing refuses what it cannot heal
            progress=new_progress("calibrating", "layers"),
            joint_progress=new_progress("measuring", "heads"),
            **source.options,
        )
    if source.heal is not None:
        report = replace(report, healing=source.heal(heldout, new_progress("healing", "updates")))
    if settings.finalize:
        finalize_(source.model)
    return report, source.write(report), source.hash


def read_windows(settings: CheckpointFreezing, data: TokenData, length: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Return calibration and held-out windows of prepared data, `[N, length]` each."""
    count = settings.heldout_count((data.num_tokens("controller") - 1) // length, length)
    heldout = heldout_windows(data, length=length, count=count)
    return calibration_windows(data, length=length, count=settings.sequences, seed=seed), heldout


# --- checkpoints of this project


def open_checkpoint_source(settings: CheckpointFreezing, say: Callable[[str], Any]) -> FreezingSource:
    """Open a checkpoint and its optimiser, whose state is carried along.

    Raises CheckpointError for a damaged checkpoint, InputError without one, or for settings that do not fit it, and
    DataError where the event would read text on which the run is reported.
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
    calibration, heldout = _windows(settings, source)
    model = checkpoint.model(pick_device(settings.device))
    optimizer = checkpoint.optimizer(model)
    options: dict[str, Any] = {"optimizer": optimizer}
    if "gradient" in settings.config.needs:
        if (gradient := recorded_gradient(model, checkpoint.state)) is None:
            raise InputError(
                f"{checkpoint.path} must hold an average of Q/K gradients for this score: train its run with "
                "--track-gradients, or choose another score"
            )
        options["score_inputs"] = {"gradient": gradient}

    def write(report: FreezeReport) -> str:
        elapsed = checkpoint.state["elapsed"]
        parts = elapsed["parts"] | {"freeze": elapsed["parts"]["freeze"] + sum(report.seconds.values())}
        return save_checkpoint(
            settings.out,
            model,
            optimizer,
            state=checkpoint.state | {"elapsed": elapsed | {"parts": parts}},
            parent=checkpoint.hash,
            add_files=lambda folder: report.save(folder, update=checkpoint.update),
        )

    return FreezingSource(
        model=model, hash=checkpoint.hash, calibration=calibration, heldout=heldout, write=write, options=options
    )


def _windows(settings: CheckpointFreezing, source: ModelFolder) -> tuple[Tensor, Tensor]:
    """Return the windows of `read_windows` from the run's data or others that do not overlap what it reports on."""
    data, most = source.data(settings.data), source.state["model"]["max_length"]
    if isinstance(data, TextData):
        raise InputError(f"data of a checkpoint must be a folder by `saf data prepare`, got {data.folder}")
    length = settings.calibration_length(source.settings.get("length") or most, most=most)
    # The run's own data have partitions that do not overlap; others may share documents with those of its report.
    trained = source.training_data() if data.fingerprint != source.state.get("data_fingerprint") else None
    if trained is not None:
        check_separate(data, data.calibration_source, trained)
        if "outputs" in settings.config.needs or settings.config.uses_joint_cost:
            check_separate(data, "controller", trained)
    seed = source.settings.get("seed", 0) if settings.calibration_seed is None else settings.calibration_seed
    return read_windows(settings, data, length, seed=seed)
