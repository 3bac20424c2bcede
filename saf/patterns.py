"""`Pattern` is the interface to the attention matrices of frozen heads; four kinds implement it.

`CompactPattern`, Eq. (3), has one logit a key and one a distance; `DensePattern` has every entry; `ExponentialPattern`,
Eq. (S.31), is a compact one that runs in linear time; `TrainablePattern` has compact logits as parameters.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from saf.errors import CheckpointError, InputError, UnsupportedError, shown
from saf.log_sums import log_row_sums

# Keys before this one may be sinks, and the canonical slope and height of alpha leave them out. Sinks are the first few
# keys, so this number is more than enough; not measured.
_FIRST_ORDINARY_KEY = 64
# How far a row's sum may be from one: what rounding T entries to the dtype can add up to, with room.
_ROW_SUM_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}


class Pattern(ABC):
    """A causal matrix `[T, T]` whose rows sum to one, or several of them along leading dimensions.

    A kind of pattern is a subclass and an entry of `PATTERN_KINDS`; backends declare which kinds they execute.
    """

    kind: ClassVar[str]
    parts: ClassVar[tuple[str, ...]]  # names of the tensors in `state`
    trainable: ClassVar[bool] = False  # whether the optimiser trains it
    length: int  # T, in tokens

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """The leading dimensions."""

    @abstractmethod
    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Return the pattern on a device, in `dtype`; a trainable one moves in place, in its own dtype."""

    @abstractmethod
    def singles(self) -> Sequence["Pattern"]:
        """Return one pattern a head, with memory of its own, from a batched pattern `[F, ...]` or from a single one."""

    @abstractmethod
    def prefix(self, length: int) -> "Pattern":
        """Return the pattern of the first `length` positions; raise InputError for more than its own."""

    @abstractmethod
    def dense(self) -> Tensor:
        """Return P entry by entry, `[..., T, T]`, in float64 unless stored."""

    @abstractmethod
    def logits(self) -> tuple[Tensor, Tensor] | None:
        """Return its present key and distance logits, `[..., T]` each; None for a dense one."""

    def compact(self) -> "CompactPattern | None":
        """Return its present values as a fixed compact pattern, in T**2 / 2 products a head; None for a dense one."""
        logits = self.logits()
        return None if logits is None else CompactPattern.from_parameters(*logits)

    def state(self) -> dict[str, Tensor]:
        """Return its tensors for a file, by the names in `parts`, detached."""
        return {name: getattr(self, name).detach().clone() for name in self.parts}

    @classmethod
    def from_state(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Return the pattern of a `state`; raise InputError for tensors that cannot be one."""
        return cls(**tensors)


class _FixedPattern(Pattern):
    """A pattern of tensors with common leading dimensions; its subclasses are dataclasses."""

    _trailing: ClassVar[int] = 1
    """Number of dimensions of its tensors that are positions or parameters."""

    def _tensors(self) -> dict[str, Tensor]:
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "length"}  # type: ignore

    def map(self, function: Callable[[str, Tensor], Tensor]) -> Self:
        """Return the pattern of changed tensors: `function(name, tensor)`."""
        return replace(self, **{name: function(name, each) for name, each in self._tensors().items()})  # type: ignore

    @classmethod
    def stack(cls, patterns: Sequence[Self]) -> Self:
        """Join patterns of one shape and dtype along a new first dimension."""
        layouts = {(one.length, *((x.shape, x.dtype) for x in one._tensors().values())) for one in patterns}
        if len(layouts) != 1:
            raise InputError(f"stack needs at least one pattern, all of one shape and dtype; got {shown(patterns)}")
        return patterns[0].map(lambda name, _: torch.stack([one._tensors()[name] for one in patterns]))

    @property
    def shape(self) -> torch.Size:
        return next(iter(self._tensors().values())).shape[: -self._trailing]

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Self:
        """Index the leading dimensions; raise InputError for an index that would reach into positions."""

        def pick(_: str, tensor: Tensor) -> Tensor:
            result = tensor[index]
            if result.shape[-self._trailing :] != tensor.shape[-self._trailing :]:
                raise InputError(f"index must select among leading dimensions {list(self.shape)}; got {shown(index)}")
            return result

        return self.map(pick)

    def singles(self) -> list[Self]:
        if len(self.shape) > 1:
            raise InputError(f"patterns of a layer have one leading dimension [F]; got shape {self.shape}")
        if not self.shape:
            return [self]
        return [self.map(lambda _, x, head=head: x[head].clone()) for head in range(self.shape[0])]

    def __repr__(self) -> str:
        first = next(iter(self._tensors().values()))
        count = " x ".join(map(str, self.shape)) + " of " if self.shape else ""
        dtype = str(first.dtype).removeprefix("torch.")
        return f"{type(self).__name__}({count}{self.length} tokens, {dtype}, {first.device})"


def _check_prefix(pattern: Pattern, length: int) -> None:
    if not 1 <= length <= pattern.length:
        raise InputError(f"prefix must have 1 to {pattern.length} positions; got length {length}")


@dataclass(frozen=True, eq=False, repr=False)
class CompactPattern(_FixedPattern):
    """Patterns `P(i, j) = exp(alpha_j + rho_{i-j} - log_z_i)` for j <= i, Eq. (3).

    `alpha` (by key position), `rho` (by distance) and `log_z` (by query position) have shape `[..., T]`; the leading
    dimensions are free. The gauge is free, too: `alpha += a + c*j, rho += b + c*δ, log_z += a + b + c*i` leaves P as it
    is, Eq. (S.6). `canonical` and `level` are the gauges to compare patterns and to execute them in.

    >>> pattern = CompactPattern.from_parameters(torch.zeros(3), torch.zeros(3))
    >>> pattern.dense()[2]
    tensor([0.3333, 0.3333, 0.3333], dtype=torch.float64)
    """

    kind: ClassVar[str] = "compact"
    parts: ClassVar[tuple[str, ...]] = ("alpha", "rho")

    alpha: Tensor
    rho: Tensor
    log_z: Tensor = None  # type: ignore[assignment]  # by default that of alpha and rho, in float64

    def __post_init__(self):
        shapes = {name: list(tensor.shape) for name, tensor in self._tensors().items() if tensor is not None}
        if any(shape != shapes["alpha"] for shape in shapes.values()) or not shapes["alpha"] or not shapes["alpha"][-1]:
            raise InputError(f"key and distance logits must share one shape [..., T], T >= 1; got {shapes}")
        for name in ("alpha", "rho", "log_z"):  # a computed one too: sums may overflow
            if (tensor := getattr(self, name)) is None:
                with torch.no_grad():
                    tensor = log_row_sums(self.alpha.double(), self.rho.double())  # Eq. (3)
                object.__setattr__(self, name, tensor)
            if not (tensor.is_floating_point() and bool(tensor.isfinite().all())):
                raise InputError(f"{name} must be floating point and finite; got {shown(tensor)}")

    @classmethod
    def from_parameters(cls, alpha: Tensor, rho: Tensor) -> "CompactPattern":
        """Build from alpha and rho `[..., T]`; log_z is computed from them in float64."""
        return cls(alpha, rho)

    @property
    def length(self) -> int:
        return self.alpha.shape[-1]

    def to(self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> "CompactPattern":
        """Move, or convert alpha and rho to `dtype`; log_z stays float64 and follows the rounded values."""
        alpha, rho = (tensor.to(device=device, dtype=dtype) for tensor in (self.alpha, self.rho))
        if dtype is None or torch.promote_types(dtype, self.alpha.dtype) == dtype:  # nothing is rounded
            return CompactPattern(alpha, rho, self.log_z.to(device=device))
        return CompactPattern.from_parameters(alpha, rho)

    def prefix(self, length: int) -> "CompactPattern":
        _check_prefix(self, length)
        # Z(i) sums keys up to i alone, so the first normalisers stay as they are.
        return self.map(lambda _, tensor: tensor[..., :length])

    def logits(self) -> tuple[Tensor, Tensor]:
        return self.alpha, self.rho

    def compact(self) -> "CompactPattern":
        return self

    def dense(self) -> Tensor:
        alpha, rho, log_z = self.alpha.double(), self.rho.double(), self.log_z.double()
        # Row i of the reversed, padded rho starts at T-1-i: rho_i .. rho_0, then -inf for later keys.
        by_distance = pad(rho.flip(-1), (0, self.length - 1), value=-torch.inf).unfold(-1, self.length, 1).flip(-2)
        return (alpha[..., None, :] + by_distance - log_z[..., :, None]).exp()  # Eq. (3)

    def canonical(self) -> "CompactPattern":
        """Return the same pattern in the gauge where alpha has no slope, max(alpha) = 0 and max(rho) = 0.

        Keys before 64 are left out of the slope and of max(alpha) when T >= 256, since they may be sinks.
        Idempotent, and the same for every gauge of one pattern, up to rounding.
        """
        first = _FIRST_ORDINARY_KEY if self.length >= 4 * _FIRST_ORDINARY_KEY else 0
        return self._in_gauge(-_median_slope(self.alpha.double()[..., first:]), first)

    def level(self) -> "CompactPattern":
        """Return the same pattern in the gauge for execution: log_z has no slope, max(alpha) = max(rho) = 0.

        Every entry is a product of two factors in [0, 1] over Z, and Z is level even when rho rises
        with distance. The slope is the least-squares one; the maxima are over all positions.
        """
        position = torch.arange(self.length, dtype=torch.float64, device=self.log_z.device)
        position -= position.mean()
        # The smallest sum of squares, at T = 2, is 0.5; a single position has no slope.
        slope = (self.log_z.double() * position).sum(-1, keepdim=True) / position.square().sum().clamp(min=0.5)
        return self._in_gauge(-slope, 0)

    def _in_gauge(self, tilt: Tensor, first: int) -> "CompactPattern":
        """Add `tilt * position`, tilt `[..., 1]`, then shift the maxima of alpha[first:] and rho to 0, Eq. (S.6)."""
        position = torch.arange(self.length, dtype=torch.float64, device=self.alpha.device)
        alpha, rho = self.alpha.double() + tilt * position, self.rho.double() + tilt * position
        alpha_shift, rho_shift = alpha[..., first:].amax(-1, keepdim=True), rho.amax(-1, keepdim=True)
        alpha, rho = alpha - alpha_shift, rho - rho_shift
        if self.alpha.dtype == torch.float64:
            return CompactPattern(alpha, rho, self.log_z + tilt * position - alpha_shift - rho_shift)
        # In a lower dtype Z must belong to the logits as they are rounded, or rows no longer sum to one.
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


@dataclass(frozen=True, eq=False, repr=False)
class DensePattern(_FixedPattern):
    """Patterns entry by entry: `weights` `[..., T, T]`, causal, non-negative, rows that sum to one but for rounding."""

    kind: ClassVar[str] = "dense"
    parts: ClassVar[tuple[str, ...]] = ("weights",)
    _trailing: ClassVar[int] = 2

    weights: Tensor

    def __post_init__(self):
        weights, tolerance = self.weights, _ROW_SUM_TOLERANCE.get(self.weights.dtype)
        if tolerance is None or weights.ndim < 2 or weights.shape[-1] != weights.shape[-2] or not weights.shape[-1]:
            raise InputError(f"weights must be floating point, [..., T, T], T >= 1; got {shown(weights)}")
        if not bool(weights.isfinite().all()) or bool((weights < 0).any()) or bool(weights.triu(1).any()):
            raise InputError("weights must be finite, non-negative and causal: mask them and normalise the rows")
        error = (weights.sum(-1, dtype=torch.float64) - 1).abs()
        if error.numel() and error.max().item() > tolerance:
            raise InputError(f"rows must sum to 1 within {tolerance}; one misses by {error.max().item():.3g}")

    @property
    def length(self) -> int:
        return self.weights.shape[-1]

    def to(self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> "DensePattern":
        return DensePattern(self.weights.to(device=device, dtype=dtype))

    def prefix(self, length: int) -> "DensePattern":
        _check_prefix(self, length)
        return DensePattern(self.weights[..., :length, :length])

    def logits(self) -> None:
        return None

    def dense(self) -> Tensor:
        return self.weights

    def state(self) -> dict[str, Tensor]:
        return {"weights": self.weights}  # not cloned, like other kinds: T x T entries, which nothing changes


@dataclass(frozen=True, eq=False, repr=False)
class ExponentialPattern(_FixedPattern):
    """Patterns `P(i, j) = exp(alpha(j)) g(i - j) / Z(i)` for j <= i; all leading dimensions are free.

    `g(δ) = exp(band[δ])` below w, and from w on, with d = δ - w, a positive sum over P poles, Eq. (S.31):

        g(δ) = sum_p exp(-damping[p] d) (cosine[p] cos(frequency[p] d) + sine[p] sin(frequency[p] d))

    `alpha(j)` is `alpha[j]` below S, and from S on `sum_k trend[k] exp(-trend_damping[k] (j - S))`, which ends at 0.
    Where S = length every key has a logit of its own. Where S < length the number of parameters is fixed, and the
    pattern can be `extended`.
    """

    kind: ClassVar[str] = "exponential"
    parts: ClassVar[tuple[str, ...]] = (
        "alpha", "band", "damping", "frequency", "cosine", "sine", "trend", "trend_damping", "length",
    )  # fmt: skip

    alpha: Tensor  # [..., S], logits of the first S keys
    band: Tensor  # [..., w], logits of the first w distances
    damping: Tensor  # [..., P], per position, none negative
    frequency: Tensor  # [..., P], radians per position; 0 for a pure decay
    cosine: Tensor  # [..., P], amplitudes at distance w
    sine: Tensor  # [..., P]
    length: int  # T, the positions that the pattern covers
    trend: Tensor = None  # type: ignore[assignment]  # [..., K], amplitudes at key S; K = 0 by default
    trend_damping: Tensor = None  # type: ignore[assignment]  # [..., K], per position, all positive

    def __post_init__(self):
        for name in ("trend", "trend_damping"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, self.alpha[..., :0])
        tensors = self._tensors()
        if not all(x.is_floating_point() and x.ndim and bool(x.isfinite().all()) for x in tensors.values()):
            raise InputError("parameters of an exponential pattern must be finite floating-point tensors [..., n]")
        shapes = {name: x.shape for name, x in tensors.items()}
        poles = {shapes[name] for name in ("damping", "frequency", "cosine", "sine")}
        leading = {shape[:-1] for shape in shapes.values()}
        keys, width, length = self.alpha.shape[-1], self.band.shape[-1], self.length
        if len(poles) > 1 or len(leading) > 1 or shapes["trend"] != shapes["trend_damping"]:
            raise InputError(f"parameters of an exponential pattern must agree in shape; got {shapes}")
        if not 1 <= width <= length or keys > length or (width < length and not self.damping.shape[-1]):
            raise InputError(
                f"alpha must have at most {length} keys, band 1 to {length} (a pole if fewer); got {shapes}"
            )
        if bool((self.damping < 0).any()) or bool((self.trend_damping <= 0).any()):
            raise InputError("damping must be at least 0 and trend_damping above 0, so that the pattern never grows")

    def to(self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> "ExponentialPattern":
        """Move, or convert to `dtype`; poles keep theirs."""
        # The error of a rounded frequency grows with distance: bfloat16 would turn by whole radians at 4,096.
        poles = ("damping", "frequency", "trend_damping")
        return self.map(lambda name, x: x.to(device=device, dtype=None if name in poles else dtype))

    def prefix(self, length: int) -> "ExponentialPattern":
        _check_prefix(self, length)
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
        """Return g, `[..., T]` float64, in P * T operations a head; raise InputError unless all of it is positive."""
        far = self.length - self.band.shape[-1]
        weights = self.band.double().exp()
        if far:  # a pattern within its band may have no poles
            poles = DampedCosines(self.damping.double(), self.frequency.double(), far)
            amplitudes = torch.cat([self.cosine, self.sine], -1).double()
            weights = torch.cat([weights, poles.sum(amplitudes)], -1)  # Eq. (S.31)
        if not bool((weights > 0).all()):
            raise InputError(f"distance weights must be positive over {self.length} positions; refit, or shorten them")
        return weights

    def key_logits(self) -> Tensor:
        """Return alpha by key, `[..., T]` float64."""
        later = self.length - self.alpha.shape[-1]
        at = torch.arange(later, dtype=torch.float64, device=self.alpha.device)
        decays = (-self.trend_damping.double()[..., None] * at).exp()
        return torch.cat([self.alpha.double(), (self.trend.double()[..., None] * decays).sum(-2)], -1)

    def logits(self) -> tuple[Tensor, Tensor]:
        return self.key_logits(), self.distance_weights().log()

    def to_compact(self, length: int | None = None) -> CompactPattern:
        """Return `compact()`, float64, over `length` positions (its own by default)."""
        return CompactPattern.from_parameters(*(self if length is None else self.extended(length)).logits())

    def dense(self, length: int | None = None) -> Tensor:
        return self.to_compact(length).dense()

    def state(self) -> dict[str, Tensor]:
        tensors = {name: tensor.detach().clone() for name, tensor in self._tensors().items()}
        return tensors | {"length": torch.tensor([self.length])}

    @classmethod
    def from_state(cls, tensors: Mapping[str, Tensor]) -> "ExponentialPattern":
        parameters: dict[str, Any] = dict(tensors)
        return cls(length=int(parameters.pop("length")), **parameters)


class DampedCosines:
    """Sums of damped cosines over n distances with fixed poles `[N, P]`, and their transpose, in P * n operations.

    Amplitudes are `[N, 2P]`, cosines and then sines. A distance is a multiple of B, about the root of n, and a rest, so
    that a sum is one small matrix product and no cosine is formed at every distance.
    """

    def __init__(self, damping: Tensor, frequency: Tensor, count: int):
        self.damping, self.frequency, self.count = damping, frequency, count
        self._block = max(1, round(count**0.5))
        blocks = -(-count // self._block)
        at = torch.arange(max(self._block, blocks), dtype=torch.float64, device=damping.device)
        pole = torch.complex(-damping, frequency)[..., None]
        self._rest = (pole * at[: self._block]).exp()  # [N, P, B]
        self._multiple = (pole * (at[:blocks] * self._block)).exp()  # [N, P, n / B]
        real, imaginary = self._multiple.real, self._multiple.imag
        # c cos + s sin = Re((c - is) multiple rest): factors of both parts of `rest`, by amplitude [N, 2, 2, P, n / B].
        self._factors = torch.stack([torch.stack([real, -imaginary], -3), torch.stack([imaginary, real], -3)], -4)
        self._parts = torch.cat([self._rest.real, self._rest.imag], -2)  # [N, 2P, B]

    def sum(self, amplitudes: Tensor) -> Tensor:
        """Return the sums at all distances, `[N, n]`."""
        by_amplitude = amplitudes.unflatten(-1, (2, 1, -1, 1))
        factors = (by_amplitude * self._factors).sum(-4).flatten(-3, -2)
        return (factors.mT @ self._parts).flatten(-2)[..., : self.count]

    def transposed(self, values: Tensor) -> Tensor:
        """Return the products of values `[N, n]` with all cosines and sines, `[N, 2P]`: the gradient of `sum`."""
        filled = pad(values, (0, -self.count % self._block))
        parts = self._parts @ filled.unflatten(-1, (-1, self._block)).mT  # [N, 2P, n / B]
        return (parts.unflatten(-2, (1, 2, -1)) * self._factors).sum((-3, -1)).flatten(-2)

    def atoms(self) -> Tensor:
        """Return every damped cosine and sine, `[N, n, 2P]`."""
        turned = (self._multiple[..., :, None] * self._rest[..., None, :]).flatten(-2)[..., : self.count].mT
        return torch.cat([turned.real, turned.imag], -1)


class TrainablePattern(nn.Module, Pattern):  # type: ignore[misc]
    """Key logits `alpha [T]` and distance logits `rho [T]` of one head, as parameters; a cast does not reach them.

    The normalisers are no parameters: they are computed from these whenever the head is executed, Eq. (3).
    """

    kind: ClassVar[str] = "trainable"
    trainable: ClassVar[bool] = True
    parts: ClassVar[tuple[str, ...]] = ("alpha", "rho")

    def __init__(self, alpha: Tensor, rho: Tensor):
        super().__init__()
        checked = CompactPattern.from_parameters(alpha, rho)
        if checked.shape or alpha.dtype not in (torch.float32, torch.float64):
            raise InputError(f"alpha and rho must be [T] in float32 or float64; got {shown(alpha)}")
        self.alpha = nn.Parameter(alpha.detach().clone())
        self.rho = nn.Parameter(rho.detach().clone())

    @classmethod
    def of(
        cls, pattern: Pattern, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> "TrainablePattern":
        """Start from a pattern `[T]`, in its level gauge; raise UnsupportedError for a dense or exponential one."""
        start = None if pattern.kind == "exponential" else pattern.compact()
        if start is None:
            raise UnsupportedError(
                f"only key and distance logits can be trained, a {type(pattern).__name__} has none; fit a compact "
                "pattern (storage='compact'), or use trainable=False"
            )
        level = start.to(dtype=torch.float64, device=device).level()
        return cls(level.alpha.to(dtype), level.rho.to(dtype))

    @property
    def length(self) -> int:
        return self.alpha.shape[0]

    @property
    def shape(self) -> torch.Size:
        return torch.Size()

    def logits(self) -> tuple[Tensor, Tensor]:
        return self.alpha.detach().clone(), self.rho.detach().clone()

    def prefix(self, length: int) -> CompactPattern:
        return CompactPattern.from_parameters(*self.logits()).prefix(length)

    def dense(self) -> Tensor:
        return CompactPattern.from_parameters(*self.logits()).dense()

    def singles(self) -> list["TrainablePattern"]:
        return [self]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "TrainablePattern":
        # `module.to(bfloat16)` moves it to a device but leaves its dtype: bfloat16 logits would lose a step's change.
        for parameter in self.parameters():
            device = fn(parameter.new_empty(0, dtype=torch.float32)).device
            parameter.data = parameter.data.to(device)
            if parameter.grad is not None:
                parameter.grad = parameter.grad.to(device)
        return self


# --- patterns of any kinds


def pattern_for_each_head(patterns: Pattern | Iterable[Pattern]) -> list[Pattern]:
    """Return one pattern a head from a batched pattern `[F, ...]`, or from a list of patterns of any kinds."""
    # Patterns first: indexing makes a batched one iterable too.
    several = [patterns] if isinstance(patterns, Pattern) else patterns
    return [single for pattern in several for single in pattern.singles()]


def is_trainable(pattern: Any) -> TypeGuard[TrainablePattern]:
    """Return whether a pattern is a module whose parameters an optimiser trains."""
    return pattern.trainable


PATTERN_KINDS: dict[str, type[Pattern]] = {
    kind.kind: kind for kind in (CompactPattern, DensePattern, ExponentialPattern, TrainablePattern)
}


def pattern_from_state(tensors: Mapping[str, Tensor], *, trainable: bool = False) -> Pattern:
    """Return the pattern of a `state`, whose names determine its kind; raise CheckpointError where none has them."""
    kinds = [kind for kind in PATTERN_KINDS.values() if kind.trainable == trainable]
    for kind in kinds:
        if set(kind.parts) == set(tensors):
            return kind.from_state(tensors)
    expected = "; ".join(f"{kind.kind}: {', '.join(kind.parts)}" for kind in kinds)
    raise CheckpointError(f"expected the tensors of a pattern ({expected}); got {sorted(tensors) or 'none'}")
