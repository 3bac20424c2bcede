"""`Task`: what a run trains on, what freezing calibrates on, and what the model is measured by.

A run assumes no text: its position in the data, and what must be equal to continue from a checkpoint, come from here.
The second half runs a model on batches to measure it, and describes the model for records.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from saf.calibration import Batch
from saf.calibration.capture import evaluation_mode
from saf.distributed import map_over_ranks, rank_and_size
from saf.errors import CheckpointError, InputError
from saf.heads import EDITED
from saf.machine import Execution, autocast, resolve_precision
from saf.models import GPT
from saf.models.adapter import Adapter, language_model, unwrap
from saf.ops import FrozenHeads

NO_TARGET = -100
"""The target of a token that is left out of the loss."""
PARENT = "parent"
"""Roles of the checkpoints that a model was derived from begin with this."""
Progress = Callable[[int, int], None]
"""Called with (done, all)."""
In = TypeVar("In")
Out = TypeVar("Out")


class Task(ABC):
    """What a run trains on and is measured by.

    In a group of processes every one calls `controller_loss` and `report` with the same model: they share the sequences
    out, the first one writes, and all get the same.
    """

    name: str
    """Its name in settings and in `TASKS`."""
    settings: Any
    """Those of the run, `saf.train.TrainConfig`, whose module imports this one."""
    length: int
    """Tokens of a sequence that the model reads."""
    vocab_size: int
    """Number of token ids of inputs and targets."""
    tokenizer_hash: str | None = None
    """SHA-256 of the tokenizer, where there is one."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """SHA-256 of all data, for training and measuring."""

    @property
    def windows_per_update(self) -> int:
        """Sequences of an update."""
        return self.settings.batch_size * self.settings.accumulation

    @property
    def targets_per_update(self) -> int:
        """Tokens of an update, those that are not counted in the loss included."""
        return self.windows_per_update * self.length

    def check(self, *, calibrates: bool, scores_outputs: bool) -> None:
        """Raise DataError now, not in the middle of training, for too few data.

        `calibrates` says that events measure attention, `scores_outputs` that their scores read held-out sequences.
        """
        if calibrates:
            self.calibration()
        if scores_outputs:
            self.heldout()

    @abstractmethod
    def batch(self, position: int, size: int) -> Tensor:
        """Inputs and targets `[2, size, length]` of the training sequences from `position` on; -100 is no target."""

    def training(
        self, update: int, device: torch.device, *, first: int = 0, every: int = 1
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the micro-batches after `update` updates: number `first`, then each `every`, for a process of several.

        The next one is fetched before this one is used.
        """
        size = self.settings.batch_size
        position = update * self.windows_per_update + first * size

        def fetch(position: int) -> Tensor:
            batch = self.batch(position, size)
            return batch.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else batch

        pending = fetch(position)
        while True:
            position += every * size
            (inputs, targets), pending = pending, fetch(position)
            yield inputs, targets

    @abstractmethod
    def calibration(self) -> Sequence[Batch]:
        """Calibration sequences, the same for every arm: LongTensors `[<= batch_size, length]`, or mappings of them."""

    @abstractmethod
    def heldout(self) -> list[Tensor]:
        """Sequences that output-aware scores read, LongTensors `[<= batch_size, length]`."""

    @abstractmethod
    def controller_loss(self, model: GPT, execution: Execution, *, batches: int | None = None) -> float:
        """Loss that decisions during a run read, nats per target: of `eval_windows` sequences, or of some batches."""

    def controller_count(self, batches: int | None) -> int:
        """Sequences of `controller_loss`."""
        return self.settings.eval_windows if batches is None else batches * self.settings.batch_size

    @abstractmethod
    def report(
        self, model: GPT, execution: Execution, *, folder: Path, checkpoints: dict[str, str | None]
    ) -> dict[str, Any]:
        """Measure the trained model and return the entries for result.json, `report_loss` among them.

        Writes the task's own files into `folder`, with the hashes of `checkpoints` by role.
        """

    @abstractmethod
    def description(self) -> dict[str, Any]:
        """The entries of config.json about the data, `fingerprint` among them."""

    def state(self, update: int) -> dict[str, Any]:
        """The entries of a checkpoint's state.json about the data after `update` updates."""
        position = update * self.windows_per_update
        state = {"sampler_position": position, "data_fingerprint": self.fingerprint, "tokenizer": self.tokenizer_hash}
        return {name: value for name, value in state.items() if value is not None}

    def check_continues(self, state: dict[str, Any], path: Path) -> None:
        """Raise unless training can continue from the checkpoint at `path`, whose state.json is `state`."""
        if state["data_fingerprint"] != self.fingerprint:
            other = f"fingerprint {state['data_fingerprint'][:16]}, this run's is {self.fingerprint[:16]}"
            raise CheckpointError(
                f"{path} was trained on other data: {other}; use its data, settings and seed, or --fresh"
            )
        if state["sampler_position"] != state["update"] * self.windows_per_update:
            used = state["sampler_position"] // max(state["update"], 1)
            sizes = f"{self.settings.batch_size} x {self.settings.accumulation}"
            raise InputError(f"batch_size x accumulation must be {used} as in {path}, got {sizes}")


# --- running a model to measure it


def run_batches(
    model: nn.Module,
    run: Callable[[In], Out],
    batches: Sequence[In],
    *,
    precision: str,
    sizes: Sequence[int] = (),
    progress: Progress | None = None,
) -> list[Out]:
    """Run batches in evaluation mode without gradients and return their results in order.

    Processes of a group divide the batches among them, and all get every result. `progress` counts the `sizes` of
    finished batches, by default each as one.
    """
    done = 0

    def run_one(batch: tuple[int, In]) -> Out:
        nonlocal done
        result, done = run(batch[1]), done + rank_and_size()[1] * batch[0]
        if progress is not None:
            progress(min(done, sum(sizes)), sum(sizes))
        return result

    sized = list(zip(sizes or [1] * len(batches), batches, strict=True))
    with evaluation_mode(model), torch.no_grad(), autocast(language_model(model).device, precision):
        return map_over_ranks(run_one, sized)


def precision_in_use(model: nn.Module, precision: str) -> str:
    """Name the precision in which a model runs under `autocast(device, precision)`.

    For float32 weights that is "fp32" or "bf16". Weights of another dtype run in it and are named too: "bf16 weights",
    or "bf16 weights, bf16 autocast". Patterns of frozen heads do not count as weights.

    Raises InputError where `precision` is "fp32" and weights are narrower.
    """
    casts = resolve_precision(language_model(model).device, precision)
    patterns = {
        parameter for module in model.modules() if isinstance(module, FrozenHeads) for parameter in module.parameters()
    }
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter not in patterns}
    short = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    names = sorted(short.get(dtype, str(dtype).removeprefix("torch.")) for dtype in dtypes)
    if names in ([], ["fp32"]):
        return casts
    weights = f"{' and '.join(names)} weights"
    if precision == "fp32" and any(dtype.itemsize < torch.float32.itemsize for dtype in dtypes):
        raise InputError(f"precision fp32 needs a model in float32, got {weights}; convert it by model.float()")
    return weights if casts == "fp32" else f"{weights}, {casts} autocast"


def model_facts(model: nn.Module) -> dict[str, Any]:
    """Describe a model's shape and, where its attention is known, count its frozen and pruned heads."""
    language, config = language_model(model), getattr(unwrap(model), "config", None)
    facts: dict[str, Any] = {
        "architecture": getattr(config, "model_type", None),
        "vocab_size": language.vocab_size,
        "hidden_size": getattr(config, "hidden_size", None),
    }
    if isinstance(language, Adapter):
        sites = language.sites()
        facts["heads_by_layer"] = [site.layout.num_heads for site in sites]
        facts["head_dim"] = sites[0].head_dim
        facts |= {kind: len(language.heads(kind)) for kind in EDITED}
    return facts
