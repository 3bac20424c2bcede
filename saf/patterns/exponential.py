"""The exponential pattern: compact, with distance weights that are free in a band and a sum of damped cosines beyond.

The sum makes the head a recurrence: it costs O(T), decodes from a state, and has a distance part of fixed size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from saf.errors import InputError
from saf.patterns.compact import CompactPattern
from saf.patterns.pattern import check_prefix, index_leading, split_leading, told


@dataclass(frozen=True, eq=False)
class ExponentialPattern:
    """Hold patterns `P(i, j) = exp(alpha(j)) g(i - j) / Z(i)` for j <= i; all leading dimensions are free.

    `g(δ) = exp(band[δ])` below w, and from w on, with d = δ - w, a sum over P poles that must stay positive:

        g(δ) = sum_p exp(-damping[p] d) (cosine[p] cos(frequency[p] d) + sine[p] sin(frequency[p] d))

    `alpha(j)` is `alpha[j]` below S, and from S on `sum_k trend[k] exp(-trend_damping[k] (j - S))`, which ends at 0.
    Where S = length every key has a logit of its own. Where S < length the pattern has a fixed number of parameters,
    and `extended` gives it at other lengths.

    Attributes:
        alpha: `[..., S]`, logits of the first S keys.
        band: `[..., w]`, logits of the first w distances.
        damping: `[..., P]`, per position, none negative.
        frequency: `[..., P]`, radians per position; 0 for a pure decay.
        cosine: `[..., P]`, amplitudes at distance w.
        sine: `[..., P]`.
        length: T, the positions that the pattern covers.
        trend: `[..., K]`, amplitudes at key S; None stands for K = 0, as in fits with every key free.
        trend_damping: `[..., K]`, per position, all positive.
    """

    kind: ClassVar[str] = "exponential"
    trainable: ClassVar[bool] = False
    parts: ClassVar[tuple[str, ...]] = (
        "alpha", "band", "damping", "frequency", "cosine", "sine", "trend", "trend_damping", "length",
    )  # fmt: skip

    alpha: Tensor
    band: Tensor
    damping: Tensor
    frequency: Tensor
    cosine: Tensor
    sine: Tensor
    length: int
    trend: Tensor = None  # type: ignore[assignment]  # always a tensor once made
    trend_damping: Tensor = None  # type: ignore[assignment]

    def __post_init__(self):
        """Raise InputError unless shapes fit together, values are finite and nothing grows with distance."""
        for name in ("trend", "trend_damping"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, self.alpha[..., :0])
        tensors = self._tensors()
        if not all(x.is_floating_point() and x.ndim and bool(x.isfinite().all()) for x in tensors.values()):
            raise InputError("parameters of an exponential pattern must be finite floating-point tensors [..., n]")
        shapes = {name: list(x.shape) for name, x in tensors.items()}
        poles, trends = {"damping", "frequency", "cosine", "sine"}, {"trend", "trend_damping"}
        alike = all(len({tuple(shapes[name]) for name in group}) == 1 for group in (poles, trends))
        if not alike or len({tuple(shape[:-1]) for shape in shapes.values()}) != 1:
            raise InputError(f"parameters of an exponential pattern must agree in shape; got {shapes}")
        keys, width = self.alpha.shape[-1], self.band.shape[-1]
        if not 1 <= width <= self.length or not 0 <= keys <= self.length:
            raise InputError(
                f"alpha must have at most {self.length} keys (length), band 1 to {self.length}; got {shapes}"
            )
        if width < self.length and not self.damping.shape[-1]:
            raise InputError(
                f"a pattern of {self.length} positions beyond a band of {width} must have a pole; got none"
            )
        if bool((self.damping < 0).any()) or bool((self.trend_damping <= 0).any()):
            raise InputError("damping must be at least 0 and trend_damping above 0, so that the pattern never grows")

    def _tensors(self) -> dict[str, Tensor]:
        """Return the parameters by name."""
        return {name: getattr(self, name) for name in self.parts if name != "length"}

    def _map(self, function: Any) -> "ExponentialPattern":
        """Return the pattern of changed parameters: `function(name, tensor)`."""
        return replace(self, **{name: function(name, x) for name, x in self._tensors().items()})

    @classmethod
    def stack(cls, patterns: Sequence["ExponentialPattern"]) -> "ExponentialPattern":
        """Join patterns of one shape and length along a new first dimension."""
        shapes = {(one.length, *(x.shape for x in one._tensors().values())) for one in patterns}
        if len(shapes) != 1:
            raise InputError(f"stack needs patterns of one length and one shape; got {len(shapes)} shapes")
        return patterns[0]._map(lambda name, _: torch.stack([getattr(one, name) for one in patterns]))

    @property
    def shape(self) -> torch.Size:
        """Return the leading dimensions."""
        return self.band.shape[:-1]

    def __repr__(self) -> str:
        return told(self, self.alpha)

    def __getitem__(self, index: Any) -> "ExponentialPattern":
        """Index the leading dimensions; raise InputError for an index that would reach into positions."""
        return self._map(lambda _, x: index_leading(x, index))

    def __len__(self) -> int:
        """Return the size of the first leading dimension."""
        if not self.shape:
            raise TypeError("a single pattern has no len(); use .length for its T")
        return self.shape[0]

    def to(self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> "ExponentialPattern":
        """Move, or convert to `dtype`; poles keep theirs, since a rounded frequency drifts with distance."""
        poles = ("damping", "frequency", "trend_damping")
        return self._map(lambda name, x: x.to(device=device, dtype=None if name in poles else dtype))

    def prefix(self, length: int) -> "ExponentialPattern":
        """Return the pattern of the first `length` positions."""
        check_prefix(length, self.length)
        return replace(self, length=length, alpha=self.alpha[..., :length], band=self.band[..., :length])

    def extended(self, length: int) -> "ExponentialPattern":
        """Return the pattern over `length` positions, more than it was fitted for.

        Raises InputError where every key has a logit of its own, or some distance weight would not be positive.
        """
        if length <= self.length:
            return self.prefix(length)
        if self.alpha.shape[-1] == self.length:
            raise InputError(f"every key has a logit of its own, so the pattern ends at {self.length}; got {length}")
        longer = replace(self, length=length)
        longer.distance_weights()
        return longer

    def distance_weights(self) -> Tensor:
        """Return g, `[..., T]` float64; raise InputError unless all of it is positive."""
        far = self.length - self.band.shape[-1]
        weights = self.band.double().exp()
        if far:
            poles = DampedCosines(self.damping.double(), self.frequency.double(), far)
            amplitudes = torch.cat([self.cosine, self.sine], -1).double()
            weights = torch.cat([weights, poles.sum(amplitudes)], -1)
        if not bool((weights > 0).all()):
            raise InputError(f"distance weights must be positive over {self.length} positions; refit, or shorten them")
        return weights

    def key_logits(self) -> Tensor:
        """Return alpha by key, `[..., T]` float64."""
        later = self.length - self.alpha.shape[-1]
        at = torch.arange(later, dtype=torch.float64, device=self.alpha.device)
        decays = (-self.trend_damping.double()[..., None] * at).exp()
        return torch.cat([self.alpha.double(), (self.trend.double()[..., None] * decays).sum(-2)], -1)

    def to_compact(self, length: int | None = None) -> CompactPattern:
        """Return the same pattern as key and distance logits, float64, over `length` positions (its own by default)."""
        at = self if length is None else self.extended(length)
        return CompactPattern.from_parameters(at.key_logits(), at.distance_weights().log())

    def compact(self) -> CompactPattern:
        """Return `to_compact()`."""
        return self.to_compact()

    def dense(self, length: int | None = None) -> Tensor:
        """Return P, `[..., T, T]` float64: rows sum to one, zero above the diagonal. T x T memory."""
        return self.to_compact(length).dense()

    def singles(self) -> list["ExponentialPattern"]:
        """Return one pattern a head of `[F, ...]`, or the pattern itself; InputError for more dimensions."""
        return split_leading(self)

    def own(self) -> "ExponentialPattern":
        """Return the pattern on the CPU."""
        return self.to(device="cpu")

    def state(self) -> dict[str, Tensor]:
        """Return the parameters, and T as a whole number."""
        tensors = {name: x.detach().clone() for name, x in self._tensors().items()}
        return tensors | {"length": torch.tensor([self.length])}

    def vectors(self) -> dict[str, Tensor]:
        """Return alpha and rho by position, `[..., T]` each, and the normalisers' logarithms."""
        return self.to_compact().vectors()

    @classmethod
    def from_state(cls, tensors: Mapping[str, Tensor]) -> "ExponentialPattern":
        """Return the pattern of `state`."""
        return cls(**{**tensors, "length": int(tensors["length"])})


class DampedCosines:
    """Sums of damped cosines over n distances with fixed poles `[N, P]`, and their transpose.

    Amplitudes are `[N, 2P]`, cosines and then sines. Distances are written as a multiple of B and a rest, so that a sum
    is one small matrix product.
    """

    def __init__(self, damping: Tensor, frequency: Tensor, count: int):
        self.damping, self.frequency, self.count = damping, frequency, count
        self.block = max(1, round(count**0.5))
        at = torch.arange(max(self.block, -(-count // self.block)), dtype=torch.float64, device=damping.device)
        pole = torch.complex(-damping, frequency)[..., None]
        self.near = (pole * at[: self.block]).exp()
        self.far = (pole * (at[: -(-count // self.block)] * self.block)).exp()

    def sum(self, amplitudes: Tensor) -> Tensor:
        """Return `[N, n]`."""
        cosine, sine = amplitudes.chunk(2, -1)
        far = torch.complex(cosine, -sine)[..., None] * self.far
        product = far.real.mT @ self.near.real - far.imag.mT @ self.near.imag
        return product.flatten(-2)[..., : self.count]

    def transposed(self, values: Tensor) -> Tensor:
        """Return, for values `[N, n]`, their products with all cosines and sines, `[N, 2P]`."""
        filled = torch.nn.functional.pad(values, (0, self.near.shape[-1] * self.far.shape[-1] - self.count))
        tiles = filled.unflatten(-1, (-1, self.block))  # [N, far, near]
        real, imaginary = tiles @ self.near.real.mT, tiles @ self.near.imag.mT  # [N, far, P]
        far_real, far_imaginary = self.far.real.mT, self.far.imag.mT
        cosines = (real * far_real - imaginary * far_imaginary).sum(-2)
        return torch.cat([cosines, (real * far_imaginary + imaginary * far_real).sum(-2)], -1)

    def atoms(self) -> Tensor:
        """Return every damped cosine and sine, `[N, n, 2P]`."""
        turned = (self.far[..., :, None] * self.near[..., None, :]).flatten(-2)[..., : self.count].mT
        return torch.cat([turned.real, turned.imag], -1)
