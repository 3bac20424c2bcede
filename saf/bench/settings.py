"""What a benchmark is asked to measure."""

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Self

from saf.errors import InputError
from saf.machine.execution import Device, Switch

Placement = Literal["early", "even"]
SETTLE_MS = 400.0
"""Of `settle_ms` on CUDA, where it is left out."""
REST_MS = 200.0
"""Of `rest_ms` on CUDA, where it is left out."""


@dataclass(kw_only=True)
class Settings:
    """What every benchmark takes; raises InputError naming the first field that cannot be used or has no effect."""

    points: tuple[str, ...] = ()
    """Shapes, as context x sequences (x micro-batches of an update): 4096x8 or 4096x8x15. Instead of --grid."""
    rates: tuple[float, ...] = ()
    """Shares of heads to freeze; the grid's when left out. 0 is always measured, as the control."""
    backends: tuple[str, ...] = ()
    """Backends of frozen heads; left out: toeplitz and, on CUDA, fused, the paper's execution."""
    kernels: tuple[str, ...] = ()
    """Attention kernels of live heads, the same on both sides of a ratio; left out: cudnn on CUDA, auto on CPU."""
    others: tuple[str, ...] | None = None
    """More kernels of ordinary attention to measure against the first one: auto, cudnn, flash, efficient, flex. Left
    out: auto, flash and flex on CUDA, none on CPU; --others alone is none."""
    free: bool = True
    """Also measure the bound: frozen heads whose mixing costs nothing."""
    pairs: int = 8
    """Pairs of each arm with its baseline, in ABBA order; 0, beside --memory, times nothing."""
    repeats: int = 1
    """Timed calls in a block; the block's time is their median."""
    warmup: int = 3
    """Untimed calls of each arm."""
    tolerance: float = 0.01
    """How far from 1 the ratio of two ordinary models may be before a measurement is refused."""
    seed: int = 0
    """Of weights, inputs, patterns and the choice of heads."""
    device: Device = "auto"
    """CUDA if there is one."""
    compile: Switch = "auto"
    """torch.compile; on for CUDA, off for CPU."""
    profile: bool = True
    """Record the kernels that one iteration of each arm runs."""
    seconds: float | None = None
    """Stop cleanly when another measurement would not end within this, and say what was left out."""

    def __post_init__(self):
        """Check what needs neither a device nor a model."""
        for name in ("pairs", "warmup"):
            self._require(name, getattr(self, name) >= 0, "at least 0")
        self._require("repeats", self.repeats >= 1, "at least 1")
        self._require("tolerance", self.tolerance > 0, "above 0")
        self._require("block_ms", getattr(self, "block_ms", 1.0) > 0, "above 0")
        for name in ("settle_ms", "rest_ms"):
            self._require(name, (getattr(self, name, None) or 0) >= 0, "at least 0")
        self._require("seconds", self.seconds is None or self.seconds > 0, "above 0")
        self._require("rates", all(0 <= rate <= 1 for rate in self.rates), "shares in [0, 1]")
        self._refuse("grid", bool(self.points), "beside points; leave one of them out")

    def _require(self, name: str, usable: bool, expected: str) -> None:
        if not usable:
            raise InputError(f"{name} must be {expected}; got {getattr(self, name)!r}")

    def _refuse(self, name: str, idle: bool, why: str) -> None:
        """Raise InputError when `idle` for a field that is there and was changed from its default."""
        usual = {field.name: field.default for field in fields(self)}
        if idle and name in usual and getattr(self, name) != usual[name]:
            raise InputError(f"{name}={getattr(self, name)!r} has no effect {why}")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON: the fields of the benchmark's own settings, without a command's."""
        return {key: value for key, value in asdict(self).items() if key in self._names()}

    @classmethod
    def _names(cls) -> set[str]:
        owner = next(kind for kind in cls.__mro__ if kind.__module__ == __name__)
        return {field.name for field in fields(owner)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Build from `to_dict`'s form, lists standing for tuples."""
        plain: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
        return cls(**plain)


@dataclass(kw_only=True)
class ModelSettings(Settings):
    """What benchmarks of whole models take."""

    model: str = "124m"
    """Preset of the model's shape; qwen3-4b, of transformers, for prefill alone."""
    num_layers: int | None = None
    """Layers, instead of the preset's: compiling all of a large model takes minutes."""
    placement: Placement = "early"
    """Which layers have frozen heads: mostly early ones, as measured on trained models, or all alike."""
    per_layer: tuple[int, ...] = ()
    """Frozen heads of each layer, instead of --rates and --placement."""
    fresh: bool = False
    """Time every block in a process of its own."""
    memory: bool = False
    """Also measure peak memory, one arm a process."""
    precompile: bool = False
    """First compile all arms in processes of their own, for the compiler's cache on disk; not with --fresh."""
    workers: int = 1
    """Processes of --memory and --precompile at a time, faster where the device holds as many models; one that fails
    beside others runs again alone."""

    def __post_init__(self):
        """Check the settings of models too."""
        super().__post_init__()
        self._require("num_layers", self.num_layers is None or self.num_layers >= 1, "at least 1")
        self._require("workers", self.workers >= 1, "at least 1")
        self._require("per_layer", not (self.per_layer and self.rates), "left out when rates are given")
        self._require("per_layer", all(count >= 0 for count in self.per_layer), "counts from 0")
        self._require("per_layer", not self.per_layer or sum(self.per_layer) > 0, "at least one head in all")
        self._require("pairs", self.pairs > 0 or self.memory, "at least 1 unless memory is measured")
        self._refuse("placement", bool(self.per_layer), "beside per_layer; leave one of them out")
        self._refuse("fresh", self.pairs == 0, "with pairs=0, which times nothing; leave it out")
        self._refuse("precompile", self.pairs == 0, "with pairs=0, which times nothing; leave it out")
        self._refuse("precompile", self.fresh, "with fresh, where every arm's processes compile; leave one of them out")
        self._refuse("precompile", self.compile == "off", "with compile='off'; leave one of them out")
        self._refuse("workers", not (self.memory or self.precompile), "without memory or precompile; add one of them")


@dataclass(kw_only=True)
class UpdateSettings(ModelSettings):
    """Whole optimiser updates: accumulation, backward, clipping, AdamW, gradient reset; data loading is left out."""

    grid: Literal["contexts", "batches", "native"] = "contexts"
    """32,768 tokens a micro-batch at 4K, 8K, 16K; batches 2, 4, 8 at 4K; or the largest batches 20, 10, 5."""
    warmup: int = 2
    """Untimed updates of each arm."""
    repeats: int = 2
    """Updates in a block, timed as one; its time is their mean."""


@dataclass(kw_only=True)
class PrefillSettings(ModelSettings):
    """Forward passes over whole prompts, with the output layer on the last token alone."""

    grid: Literal["lengths", "batches", "qwen"] = "lengths"
    """T 512 to 16K at B=64, B 1 to 64 at T=4096, or B 4 and 8 at 2K, 4K, 8K."""
    precisions: tuple[str, ...] = ()
    """autocast (fp32 weights, bf16 autocast), bf16 (bf16 weights) or fp32; left out: autocast on CUDA, fp32 on CPU."""
    graphs: Literal["off", "on", "both"] = "off"
    """Call the model, replay a CUDA graph of it, or both."""
    repeats: int = 40
    """Timed calls in a block; the block's time is their median."""
    block_ms: float = 200.0
    """Fewer repeats where a block would take longer than this, milliseconds."""
    settle_ms: float | None = None
    """Untimed calls before every block for about this long; left out: 400 ms on CUDA, none on CPU."""


@dataclass(kw_only=True)
class OpSettings(Settings):
    """One layer's attention without projections: frozen heads alone, and the whole layer."""

    grid: Literal["lengths", "qwen"] = "lengths"
    """32,768 tokens at 1K to 64K, or B 4 and 8 at 2K, 4K, 8K."""
    shape: str = "124m"
    """Preset whose heads and channels the layer has; also qwen3-4b."""
    num_heads: int | None = None
    """Query heads, instead of the shape's."""
    num_kv_heads: int | None = None
    """Key and value heads, instead of the shape's."""
    head_dim: int | None = None
    """Channels of a head, instead of the shape's."""
    parts: tuple[Literal["frozen", "layer"], ...] = ("frozen", "layer")
    """The frozen heads against the same heads as ordinary attention; the mixed layer against an ordinary one."""
    directions: tuple[Literal["forward", "both"], ...] = ("forward", "both")
    """Forward alone, forward and backward."""
    graphs: Literal["off", "on", "both"] = "both"
    """Events around each eager call, around replays of a CUDA graph (no launch cost, layers compiled), or both."""
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Of the operands; bf16 on CUDA, fp32 on CPU."""
    repeats: int = 20
    """Passes over the operands in a block; the block's time is their median."""
    block_ms: float = 15.0
    """Fewer repeats where a block would take longer than this, milliseconds."""
    rest_ms: float | None = None
    """Idle time before every block, so that each begins at full clocks, ms; left out: 200 ms on CUDA, none on CPU."""

    def __post_init__(self):
        """Check the settings of operators too."""
        super().__post_init__()
        self._require("pairs", self.pairs >= 1, "at least 1")
        for name in ("num_heads", "num_kv_heads", "head_dim"):
            self._require(name, getattr(self, name) is None or getattr(self, name) >= 1, "at least 1")
        for name in ("parts", "directions"):
            self._require(name, len(getattr(self, name)) >= 1, "at least one")
        own = self.num_heads is not None and self.head_dim is not None
        self._refuse("shape", own, "beside num_heads and head_dim; leave it out, or one of them")


KINDS: dict[str, type[Settings]] = {"update": UpdateSettings, "prefill": PrefillSettings, "op": OpSettings}
