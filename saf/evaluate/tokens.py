"""Every token's log-probability in an evaluation, in two bytes a token, checked against what was recorded.

A loss `x` is a 16-bit number of steps, each 1/65534 of the range of all losses, above the smallest loss. The rounding
error goes to the next token of the window, so that a token is off by less than one step (of about 4e-4 nats, for losses
up to 25), and the mean of a window of `T` tokens by at most half a step over `T` (5e-8 nats at 4,096). float16 is off
by up to 4e-3 a token at losses of 8 to 16 nats. The means of the windows before rounding stand beside: what is computed
from them is the same as from float32 log-probabilities, bit for bit.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from saf.errors import InputError
from saf.evaluate.paired import window_losses
from saf.records.files import file_hash, read_tensors, write_tensors

FILE = "log_probs.safetensors"
_STEPS = 65_534
"""One fewer than 16 bits hold: the rounding error of the token before may add one."""


@dataclass(frozen=True)
class TokenLosses:
    """The losses of one evaluation, in nats."""

    windows: Tensor
    """Mean loss of each window before rounding, `[windows]` float64."""
    steps: Tensor | None = None
    """Loss of each token in steps above `smallest`, `[windows, T]` uint16; None where windows alone were kept."""
    smallest: float = 0.0
    """The smallest loss."""
    step: float = 0.0
    """Nats of one step."""

    @classmethod
    def of(cls, log_probs: Tensor, *, tokens: bool = True) -> "TokenLosses":
        """Round log-probabilities `[windows, T]`, or without `tokens` keep the means of windows alone.

        Raises InputError for values that are not finite, or none.
        """
        windows = window_losses(log_probs)
        if not tokens:
            return cls(windows)
        losses = -log_probs.detach().double()
        smallest = float(losses.min())
        # Equal losses have no range; any step will do.
        step = (float(losses.max()) - smallest) / _STEPS or 1.0
        sums = ((losses - smallest).cumsum(dim=1) / step).round()
        steps = sums.diff(dim=1, prepend=torch.zeros_like(sums[:, :1]))
        return cls(windows, steps.to(torch.uint16), smallest, step)

    @property
    def log_probs(self) -> Tensor:
        """Every token's log-probability to within one step, `[windows, T]` float64, nats."""
        if self.steps is None:
            raise InputError(
                "this evaluation has the losses of windows alone; for those of tokens, `saf evaluate` the run's last "
                "checkpoint, or train with token_losses"
            )
        return -(self.smallest + self.step * self.steps.double())

    def write(self, folder: Path) -> str:
        """Write the file into a folder and return its SHA-256."""
        tensors = {"windows": self.windows}
        if self.steps is not None:
            scale = torch.tensor([self.smallest, self.step], dtype=torch.float64)
            tensors |= {"steps": self.steps, "scale": scale}
        return file_hash(write_tensors(folder / FILE, tensors))

    @classmethod
    def read(cls, path: Path) -> "TokenLosses":
        """Read what `write` wrote; raise InputError when it holds anything else."""
        tensors = read_tensors(path)
        shapes = {name: tensor.ndim for name, tensor in tensors.items()}
        if shapes == {"windows": 1}:
            return cls(tensors["windows"])
        if shapes != {"windows": 1, "steps": 2, "scale": 1} or len(tensors["scale"]) != 2:
            raise InputError(f"{path} must hold windows [W], steps [W, T] and scale [2], got {shapes or 'nothing'}")
        smallest, step = tensors["scale"].tolist()
        return cls(tensors["windows"], tensors["steps"], smallest, step)

    def check(self, path: Path, *, windows: int, length: int, loss: float) -> None:
        """Raise InputError unless windows and tokens are as many as were recorded and give the recorded mean loss."""
        shape = [len(self.windows), length] if self.steps is None else [*self.steps.shape]
        if shape != [windows, length] or len(self.windows) != windows:
            raise InputError(f"{path} must hold log-probabilities {[windows, length]} as recorded, got {shape}")
        # Sums of float64 in another order: a few units in the sixteenth digit.
        exactly = 1e-12 * max(1.0, abs(loss))
        mean, error = float(self.windows.mean()), 0.0
        if self.steps is not None:
            error = float((self.windows + self.log_probs.mean(dim=1)).abs().max())
        if abs(mean - loss) > exactly or error > self.step / (2 * length) + exactly:
            raise InputError(
                f"{path} gives a mean loss of {mean:.9f}, its tokens up to {error:.2g} off that; evaluation.json "
                f"records {loss:.9f}: they are not of one evaluation"
            )
