"""The compact pattern: `P(i, j) = exp(alpha_j + rho_{i-j}) / Z_i` of Eq. (3), three vectors of length T."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from saf.errors import InputError
from saf.patterns.log_sums import log_row_sums
from saf.patterns.pattern import check_prefix, index_leading, split_leading, told

# Keys before this one may be sinks; they have no say in the slope and height of alpha. Sinks are the first few keys, so
# that so many are more than enough; chosen, not measured.
_FIRST_ORDINARY_KEY = 64


@dataclass(frozen=True, eq=False)
class CompactPattern:
    """Hold patterns `P(i, j) = exp(alpha_j + rho_{i-j} - log_z_i)` for j <= i, Eq. (3).

    `alpha` (by key position), `rho` (by distance) and `log_z` (by query position) have shape `[..., T]`; the
    leading dimensions are free. `alpha += a + c*j, rho += b + c*δ, log_z += a + b + c*i` leaves P as it is.

    >>> pattern = CompactPattern.from_parameters(torch.zeros(3), torch.zeros(3))
    >>> pattern.dense()[2]
    tensor([0.3333, 0.3333, 0.3333], dtype=torch.float64)
    """

    kind: ClassVar[str] = "compact"
    trainable: ClassVar[bool] = False
    parts: ClassVar[tuple[str, ...]] = ("alpha", "rho")

    alpha: Tensor
    rho: Tensor
    log_z: Tensor

    def __post_init__(self):
        """Raise InputError unless the three tensors are floating and share one shape `[..., T]`, T >= 1."""
        shapes = [list(tensor.shape) for tensor in (self.alpha, self.rho, self.log_z)]
        if shapes[0] != shapes[1] or shapes[0] != shapes[2] or not shapes[0] or shapes[0][-1] == 0:
            raise InputError(f"alpha, rho and log_z must share one shape [..., T], T >= 1; got {shapes}")
        if not all(tensor.is_floating_point() for tensor in (self.alpha, self.rho, self.log_z)):
            raise InputError("alpha, rho and log_z must be floating point")
        if unusable := [name for name, values in self.vectors().items() if not bool(values.isfinite().all())]:
            raise InputError(f"{' and '.join(unusable)} must be finite")

    @classmethod
    def from_parameters(cls, alpha: Tensor, rho: Tensor) -> "CompactPattern":
        """Build from alpha and rho `[..., T]`, kept as given; log_z is computed from them in float64.

        Raises InputError for shapes that differ or values that are not finite.
        """
        if alpha.shape != rho.shape:
            raise InputError(f"alpha and rho must share one shape; got {list(alpha.shape)} and {list(rho.shape)}")
        if alpha.dtype != rho.dtype or not alpha.is_floating_point():
            raise InputError(f"alpha and rho must share one dtype, floating point; got {alpha.dtype}, {rho.dtype}")
        with torch.no_grad():
            return cls(alpha, rho, log_row_sums(alpha.double(), rho.double()))

    @classmethod
    def stack(cls, patterns: Sequence["CompactPattern"]) -> "CompactPattern":
        """Join patterns of one shape along a new first dimension."""
        if not patterns:
            raise InputError("stack needs at least one pattern")
        if len({(p.alpha.shape, p.alpha.dtype) for p in patterns}) > 1:
            raise InputError(f"stack needs one shape and dtype; got {[list(p.alpha.shape) for p in patterns]}")
        alpha, rho, log_z = zip(*((p.alpha, p.rho, p.log_z) for p in patterns), strict=True)
        return cls(torch.stack(alpha), torch.stack(rho), torch.stack(log_z))

    @property
    def length(self) -> int:
        """Return T, in tokens."""
        return self.alpha.shape[-1]

    @property
    def shape(self) -> torch.Size:
        """Return the leading dimensions, without T."""
        return self.alpha.shape[:-1]

    def __repr__(self) -> str:
        return told(self, self.alpha)

    def __getitem__(self, index: Any) -> "CompactPattern":
        """Index the leading dimensions; raise InputError for an index that would reach into positions."""
        return CompactPattern(*(index_leading(tensor, index) for tensor in (self.alpha, self.rho, self.log_z)))

    def __len__(self) -> int:
        """Return the size of the first leading dimension."""
        if not self.shape:
            raise TypeError("a single pattern has no len(); use .length for its T")
        return self.shape[0]

    def to(self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> "CompactPattern":
        """Move, or convert alpha and rho to `dtype`; log_z stays float64 and follows the rounded values."""
        alpha, rho = (tensor.to(device=device, dtype=dtype) for tensor in (self.alpha, self.rho))
        if dtype is None or dtype == self.alpha.dtype or torch.promote_types(dtype, self.alpha.dtype) == dtype:
            return CompactPattern(alpha, rho, self.log_z.to(device=device))
        return CompactPattern.from_parameters(alpha, rho)

    def prefix(self, length: int) -> "CompactPattern":
        """Return the pattern of the first `length` positions; each row keeps its normaliser."""
        check_prefix(length, self.length)
        return CompactPattern(self.alpha[..., :length], self.rho[..., :length], self.log_z[..., :length])

    def compact(self) -> "CompactPattern":
        """Return the pattern itself."""
        return self

    def singles(self) -> list["CompactPattern"]:
        """Return one pattern `[T]` a head of `[F, T]`, or the pattern itself; InputError for more dimensions."""
        return split_leading(self)

    def own(self) -> "CompactPattern":
        """Return the pattern on the CPU."""
        return self.to(device="cpu")

    def state(self) -> dict[str, Tensor]:
        """Return alpha and rho, `[..., T]` each; the normalisers are computed from them again."""
        return {"alpha": self.alpha.detach().clone(), "rho": self.rho.detach().clone()}

    def vectors(self) -> dict[str, Tensor]:
        """Return alpha, rho and log_z, `[..., T]` each."""
        return {"alpha": self.alpha, "rho": self.rho, "log_z": self.log_z}

    @classmethod
    def from_state(cls, tensors: Mapping[str, Tensor]) -> "CompactPattern":
        """Return the pattern of `state`."""
        return cls.from_parameters(tensors["alpha"], tensors["rho"])

    def log_prob(self) -> Tensor:
        """Return log P, `[..., T, T]` float64, -inf above the diagonal."""
        alpha, rho, log_z = self.alpha.double(), self.rho.double(), self.log_z.double()
        # Row i of the reversed, padded rho starts at T-1-i: rho_i .. rho_0, then -inf for later keys.
        padded = torch.nn.functional.pad(rho.flip(-1), (0, self.length - 1), value=-torch.inf)
        return alpha[..., None, :] + padded.unfold(-1, self.length, 1).flip(-2) - log_z[..., :, None]

    def dense(self) -> Tensor:
        """Return P, `[..., T, T]` float64: rows sum to one, zero above the diagonal. T x T memory."""
        return self.log_prob().exp()

    def canonical(self) -> "CompactPattern":
        """Return the same pattern in the gauge where alpha has no slope, max(alpha) = 0 and max(rho) = 0.

        Keys before 64 are left out of the slope and of max(alpha) when T >= 256, since they may be sinks.
        Idempotent, and the same for every gauge of one pattern, up to rounding.
        """
        first = _FIRST_ORDINARY_KEY if self.length >= 4 * _FIRST_ORDINARY_KEY else 0
        tilt = -_median_slope(self.alpha.double()[..., first:])
        return self._gauge(tilt, first)

    def balanced(self) -> "CompactPattern":
        """Return the same pattern in the gauge for execution: log_z has no slope, max(alpha) = max(rho) = 0.

        Every entry is a product of two factors in [0, 1] over Z, and Z is level even when rho rises
        with distance. The slope is the least-squares one; the maxima are over all positions.
        """
        position = torch.arange(self.length, dtype=torch.float64, device=self.log_z.device)
        position -= position.mean()
        # The smallest sum of squares, at T = 2, is 0.5; a single position has no slope.
        slope = (self.log_z.double() * position).sum(-1, keepdim=True) / position.square().sum().clamp(min=0.5)
        return self._gauge(-slope, 0)

    def _gauge(self, tilt: Tensor, first: int) -> "CompactPattern":
        """Add `tilt * position`, tilt `[..., 1]`, then shift the maxima of alpha[first:] and rho to 0."""
        position = torch.arange(self.length, dtype=torch.float64, device=self.alpha.device)
        alpha, rho = self.alpha.double() + tilt * position, self.rho.double() + tilt * position
        alpha_shift, rho_shift = alpha[..., first:].amax(-1, keepdim=True), rho.amax(-1, keepdim=True)
        alpha, rho = alpha - alpha_shift, rho - rho_shift
        if self.alpha.dtype == torch.float64:
            return CompactPattern(alpha, rho, self.log_z + tilt * position - alpha_shift - rho_shift)
        return CompactPattern.from_parameters(alpha.to(self.alpha.dtype), rho.to(self.rho.dtype))


def _median_slope(values: Tensor) -> Tensor:
    """Return the median over j of `(values[j + lag] - values[j]) / lag`, `[..., 1]`, lag half of `[..., n]`.

    Neighbour differences would measure sampling noise; a lag this long averages it and ignores outliers.
    """
    if values.shape[-1] == 1:
        return torch.zeros_like(values)
    lag = values.shape[-1] // 2
    # Not torch.median, which takes the lower of two middle values, nor quantile, which has a size limit.
    slopes = ((values[..., lag:] - values[..., :-lag]) / lag).sort(-1).values
    count = slopes.shape[-1]
    return (slopes[..., (count - 1) // 2 :][..., :1] + slopes[..., count // 2 :][..., :1]) / 2
