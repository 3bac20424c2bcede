"""What the output-aware scores read: how each head's output weighs in its layer, at sampled query positions."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class HeadOutputs:
    """Hold what `saf.calibration.head_outputs` measures on held-out sequences; float64, NaN for frozen heads.

    The S samples are pairs of a sequence and a query position. C is a head's contribution to the residual stream
    `[S, d]`, D the change of it when the head's pattern is replaced, O the layer's attention output and Y the residual
    stream after it.
    """

    gram: Tensor
    """`[L, H, H]` inner products of the C of two heads of a layer, summed over samples and channels."""
    change: Tensor
    """`[L, H, S]` norm of D."""
    residual_change: Tensor
    """`[L, H, S]` inner product of Y and D."""
    residual: Tensor
    """`[L, S]` norm of Y."""
    output: Tensor
    """`[L, S]` norm of O."""
    hidden_size: int
    """d, channels of the residual stream."""

    @property
    def num_samples(self) -> int:
        """Return S, the number of samples."""
        return self.residual.shape[-1]
