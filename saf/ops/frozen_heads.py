"""`FrozenHeads`: the frozen heads of one layer, their backend, and their mark in state dicts.

`choose_backend` has the rule of `"auto"`; `for_graphs` says that a CUDA graph will replay what layers launch;
`LayoutMixin` writes into a layer's state dict which heads are frozen, so that weights of other heads are refused.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from saf.errors import CheckpointError, InputError, UnsupportedError, check_name
from saf.heads import EDITED, KINDS, HeadLayout
from saf.ops.backend import Backend, Tables
from saf.ops.fused.op import Fused
from saf.ops.linear.op import Linear
from saf.ops.reference import Reference
from saf.ops.toeplitz.op import Toeplitz
from saf.patterns import Pattern, is_trainable, pattern_for_each_head

BACKENDS: dict[str, Backend] = {
    "toeplitz": Toeplitz(), "linear": Linear(), "fused": Fused(), "reference": Reference(),
}  # fmt: skip
AUTO_ORDER = ("toeplitz", "reference")
"""What `"auto"` tries in turn. `fused` is the paper's execution, there to be measured: `toeplitz` is faster."""


class FrozenPart(NamedTuple):
    """Fixed patterns of a layer that one backend executes: their slots among the frozen ones, and their tables."""

    backend: Backend
    slots: tuple[int, ...]
    tables: Tables


class FrozenHeads(nn.Module):
    """Execute the patterns of a layer's frozen heads, for up to `max_length` positions.

    Fixed patterns are tables, computed once; trainable ones are modules `pattern_SLOT` whose parameters alpha and rho
    are read in every forward pass. Build it with `from_patterns`. Buffers and parameters keep their dtype when the
    model is cast; the device follows, and tables for values of the new dtype are added where the backend has them.

    Attributes:
        groups: The slots of fixed patterns that each backend executes: "linear" leaves other kinds to "toeplitz".
        trainable: The slots of trainable patterns.
        dtypes: The value dtypes that tables were prepared for.
        replayed: Whether a CUDA graph launches what a call launches; `for_graphs` sets it.
    """

    def __init__(self, patterns: list[Pattern], backend: str, max_length: int, kv_head: tuple[int, ...] | None):
        super().__init__()
        self.trainable = tuple(slot for slot, one in enumerate(patterns) if one.trainable)
        # Not only in the list: as children their parameters are the model's.
        for slot, one in enumerate(patterns):
            if is_trainable(one):
                self.add_module(f"pattern_{slot}", one)
        self.patterns = [one if one.trainable else one.to(device="cpu") for one in patterns]
        self.backend, self.max_length, self.kv_head = backend, max_length, kv_head
        self.replayed = False
        self.groups: dict[str, tuple[int, ...]] = {}
        for slot, one in enumerate(patterns):
            name = "toeplitz" if backend == "linear" and one.kind != "exponential" else backend
            if not one.trainable:
                self.groups[name] = (*self.groups.get(name, ()), slot)
        self.dtypes: tuple[torch.dtype, ...] = ()
        self._names: dict[tuple[torch.dtype, str], dict[str, str]] = {}
        self._static: dict[tuple[torch.dtype, str], dict[str, Any]] = {}

    @classmethod
    def from_patterns(
        cls, pattern: Pattern | Sequence[Pattern], *, backend: str = "auto",
        dtype: torch.dtype | Sequence[torch.dtype] = torch.float32, device: torch.device | str = "cpu",
        kv_head: Sequence[int] | Tensor | None = None,
    ) -> "FrozenHeads":  # fmt: skip
        """Prepare patterns over `[F, T]`, in head order, for values of `dtype` (one or several).

        A list may mix all kinds of patterns; trainable ones keep their parameters.
        `kv_head [H]`, in slot order, names the value head each slot reads; without it slots and value heads
        correspond one to one. Raises InputError on unequal lengths and UnsupportedError when a named backend
        cannot run here, or cannot train a pattern.
        """
        patterns, device = pattern_for_each_head(pattern), torch.device(device)
        lengths = {single.length for single in patterns}
        if len(lengths) != 1:
            raise InputError(f"frozen heads of a layer need patterns of one length; got {sorted(lengths)}")
        dtypes = (dtype,) if isinstance(dtype, torch.dtype) else tuple(dtype)
        slots = None if kv_head is None else tuple(map(int, kv_head))
        if slots is not None and (len(slots) < len(patterns) or min(slots) < 0):
            raise InputError(f"kv_head must name one value head per slot, from 0, {len(patterns)} frozen; got {slots}")
        trained = any(map(is_trainable, patterns))
        exponential = any(one.kind == "exponential" for one in patterns)
        name = choose_backend(backend, device=device, dtypes=dtypes, trainable=trained, exponential=exponential)
        heads = cls(patterns, name, lengths.pop(), slots)
        for each in dtypes if trained else ():
            alpha, rho = heads.logits()
            if reason := BACKENDS[name].untrainable_reason(alpha.detach(), rho.detach(), each):
                raise UnsupportedError(f"backend {name!r} cannot train these patterns: {reason}")
        heads.to(device)
        heads._prepare(patterns, dtypes, device)
        return heads

    def _prepare(self, patterns: Sequence[Pattern], dtypes: Sequence[torch.dtype], device: torch.device) -> None:
        """Add the backends' tables of the fixed ones among `patterns` for values of some dtypes."""
        self.dtypes = tuple(dict.fromkeys((*self.dtypes, *dtypes)))
        for name, slots in self.groups.items():
            kv_head = None
            if self.kv_head is not None:  # of live slots and these
                live, own = self.kv_head[: -self.num_frozen], self.kv_head[-self.num_frozen :]
                kv_head = (*live, *(own[slot] for slot in slots))
            fixed = [patterns[slot] for slot in slots]
            with torch.inference_mode(False), torch.no_grad():
                prepared = BACKENDS[name].prepare(fixed, dtypes, device, kv_head)
            for dtype, tables in prepared.items():
                self._add_tables(dtype, name, tables)

    def _add_tables(self, dtype: torch.dtype, backend: str, tables: Tables) -> None:
        """Register the tensors among tables as buffers, so that they move with the model; keep the rest."""
        prefix, tensors = str(dtype).removeprefix("torch."), [n for n, x in tables.items() if isinstance(x, Tensor)]
        self._names[dtype, backend] = {name: f"{prefix}_{backend}_{name}" for name in tensors}
        self._static[dtype, backend] = {name: each for name, each in tables.items() if name not in tensors}
        for name, buffer in self._names[dtype, backend].items():
            self.register_buffer(buffer, tables[name], persistent=False)

    @property
    def num_frozen(self) -> int:
        """Return how many heads the patterns belong to."""
        return len(self.patterns)

    def parts(self, dtype: torch.dtype) -> list[FrozenPart]:
        """Return the fixed patterns by backend, for values of `dtype`; raise InputError where none were prepared."""
        if dtype not in self.dtypes:
            names = [str(each) for each in self.dtypes]
            raise InputError(
                f"values must be of what frozen heads were prepared for, {names}, got {dtype}: cast the model"
            )
        return [FrozenPart(BACKENDS[name], slots, self.tables(dtype, name)) for name, slots in self.groups.items()]

    def tables(self, dtype: torch.dtype, backend: str | None = None) -> Tables:
        """Return a backend's tables for values of `dtype`, those of the layer's own by default."""
        key = dtype, backend or self.backend
        return self._static[key] | {name: self._buffers[at] for name, at in self._names[key].items()}

    def logits(self) -> tuple[Tensor, Tensor]:
        """Return alpha and rho of the trainable patterns, `[trainable, T]` each."""
        patterns = [one for one in self.children() if is_trainable(one)]
        return torch.stack([one.alpha for one in patterns]), torch.stack([one.rho for one in patterns])

    def program(self) -> tuple[Any, ...]:
        """Return what compiled code of these heads depends on, apart from shapes and dtypes of its tensors."""
        static = tuple((*key, *sorted(ints.items())) for key, ints in self._static.items())
        return self.backend, self.max_length, self.kv_head, self.trainable, self.num_frozen, self.replayed, static

    @property
    def allocated(self) -> int:
        """Return the bytes of the memory that tables and trained logits lie in, every piece counted once."""
        storages = [tensor.untyped_storage() for tensor in [*self.buffers(), *self.parameters()]]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    @property
    def linear(self) -> tuple[int, ...]:
        """Return the frozen slots that decode from a `RecurrentState`."""
        return self.groups.get("linear", ())

    def state_sizes(self) -> tuple[int, int, int, int]:
        """Return the sizes of `RecurrentState.empty` for the slots in `linear`."""
        tables = self.tables(self.dtypes[0])
        return len(self.linear), *tables["near"].shape[1:3], tables["write"].shape[1]

    def check_values(self, value: Tensor, backend: str) -> None:
        """Raise InputError for values of a wrong shape, too long or not where the tables are, or another backend."""
        if value.dim() != 4 or not value.shape[-2]:
            raise InputError(f"value must be [batch, heads, positions >= 1, head_dim]; got shape {tuple(value.shape)}")
        if backend not in ("auto", self.backend):
            raise InputError(f"frozen heads were prepared for backend {self.backend!r}, not {backend!r}")
        if (length := value.shape[-2]) > self.max_length:
            raise InputError(beyond_patterns(length, self.max_length))
        # Of tables on "meta" operators would return anything; a backend without tables runs anywhere.
        if (device := self._device()) is not None and value.device != device:
            where = f"values are on {value.device}, the frozen heads' tables on {device}"
            raise InputError(f"{where}; move the model as a whole, and do not offload buffers")

    def _device(self) -> torch.device | None:
        """Return where the tables or the trained logits are; None while there are none."""
        for table in self._buffers.values():  # in every call, so without a walk over modules
            if table is not None:
                return table.device
        return next((logits.device for logits in self.parameters()), None)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FrozenHeads":
        """Follow the module to another device; keep every dtype, and prepare for the one that values will have."""
        before = self._device() or torch.device("cpu")
        for pattern in self.children():
            pattern._apply(fn)
        for key, tensor in list(self._buffers.items()):
            if tensor is not None:
                self._buffers[key] = tensor.to(fn(tensor.new_empty(0, dtype=torch.float32)).device)
        device = self._device() or torch.device("cpu")
        backend, values = BACKENDS[self.backend], [fn(torch.empty(0, dtype=d, device=device)) for d in self.dtypes]
        # Tables of kernels are others than those of plain PyTorch.
        stale = self.dtypes if {before.type, device.type} == {"cpu", "cuda"} else ()
        new = [x.dtype for x in values if x.dtype not in self.dtypes]
        dtypes = [dtype for dtype in dict.fromkeys((*stale, *new)) if backend.unsupported_reason(device, dtype) is None]
        for key in [key for key in self._names if key[0] in dtypes]:
            for name in self._names.pop(key).values():
                del self._buffers[name]
        if dtypes:
            self._prepare(self.patterns, dtypes, device)
        return self

    def extra_repr(self) -> str:
        return f"num_frozen={self.num_frozen}, max_length={self.max_length}, backend={self.backend!r}"


def beyond_patterns(length: int, longest: int) -> str:
    """Return the message for an input longer than the patterns of frozen heads."""
    return f"input has {length} positions, the frozen heads' patterns cover {longest}: shorten it, or freeze for more"


@contextmanager
def for_graphs(model: nn.Module) -> Iterator[None]:
    """Let the layers of `model` take what is fastest in a CUDA graph: warm up and capture inside, replay anywhere.

    A graph takes the host out, so that fewer prompts gain by one launch (`saf.ops.fused.op.HOST_BOUND`). Compilers
    guard on this mark of the layers: code compiled outside is compiled once more inside. Capture a program of its own
    (`saf.machine.own_program`), so that calls do not carry what graphs compiled.
    """
    layers = [module for module in model.modules() if isinstance(module, FrozenHeads)]
    before = [layer.replayed for layer in layers]
    for layer in layers:
        layer.replayed = True
    try:
        yield
    finally:
        for layer, replayed in zip(layers, before, strict=True):
            layer.replayed = replayed


# --- the rule of "auto"


def choose_backend(
    name: str, *, device: torch.device, dtypes: Sequence[torch.dtype], trainable: bool = False,
    exponential: bool = False,
) -> str:  # fmt: skip
    """Return a backend's name: `"auto"` is the first of `AUTO_ORDER` that supports device and every dtype.

    With `exponential` patterns in a layer it tries `linear` before these. With `trainable` it must have gradients for
    key and distance logits. Raises InputError for an unknown name and UnsupportedError when a named backend cannot
    run: it is never replaced by another one.
    """
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError("device='cuda', but torch sees no CUDA device; use device='cpu'")
    check_name("backend", name, ("auto", *BACKENDS))
    reasons = {}
    for candidate in ("linear",) * exponential + AUTO_ORDER if name == "auto" else (name,):
        backend = BACKENDS[candidate]
        own = [reason for dtype in dtypes if (reason := backend.unsupported_reason(device, dtype))]
        if trainable and not backend.trains:
            own.insert(0, "it has no gradients for key and distance logits (trainable=True)")
        if not own:
            return candidate
        reasons[candidate] = own[0]
    if name == "auto":
        raise UnsupportedError(f"no backend runs on {device} with values of dtype {list(dtypes)}: {reasons}")
    raise UnsupportedError(f"backend {name!r} cannot run: {reasons[name]}; use backend='auto' or another one")


def explain(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> list[str]:
    """Return lines that say which backend `"auto"` takes for this device and dtype, and why not the others."""
    device, order = torch.device(device), ", ".join(AUTO_ORDER)
    rule = f"linear for layers with exponential patterns, else the first of {order}, that supports device and dtype"
    lines = [f"rule: {rule}"]
    for name, backend in BACKENDS.items():
        reason = backend.unsupported_reason(device, dtype)
        how = backend.describe(device, dtype) if reason is None else f"no: {reason}"
        lines.append(f"{name} on {device.type}, {str(dtype).removeprefix('torch.')}: {how}")
    return [*lines, f"auto: {choose_backend('auto', device=device, dtypes=[dtype])}"]


# --- the mark in a state dict

LAYOUT = "frozen_layout"
"""The name of the tensor in a state dict, after that of the layer."""


class LayoutMixin(nn.Module):
    """Keep in the state dict which heads of an attention layer are frozen, by which patterns, and which are pruned.

    `frozen_layout [H, 2]`, int64, by original heads: the kind (its index in `KINDS`: 0 live, 1 frozen, 2 pruned), then
    a digest of a fixed pattern. It is None, and no key of the state dict, while all heads are live. `load_state_dict`
    raises CheckpointError for weights of this layer with another layout or without one, also with `strict=False`. The
    patterns themselves are not in a state dict, but for trainable ones, which are parameters: `saf.save` writes them.
    """

    frozen_layout: Tensor | None = None
    """No buffer: averaging a model's buffers, or casting all of them, would round the digests."""

    def set_layout(self, layout: HeadLayout, frozen: FrozenHeads | None) -> None:
        """Keep this layout from now on."""
        self.frozen_layout = None
        if not layout.ordinary:
            rows = torch.zeros(layout.num_heads, 2, dtype=torch.int64)
            for number, kind in enumerate(KINDS):
                rows[list(getattr(layout, kind)), 0] = number
            for head, pattern in zip(layout.frozen, () if frozen is None else frozen.patterns, strict=True):
                rows[head, 1] = 0 if pattern.trainable else _digest(pattern)
            self.frozen_layout = rows

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.frozen_layout is not None:
            destination[prefix + LAYOUT] = self.frozen_layout.clone()  # averages are written into a state dict, too

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Compare before anything of the layer is loaded, where there is any; the layout of this model stays."""
        if any(name.startswith(prefix) for name in state_dict):
            compare_layouts(prefix.rstrip("."), self.frozen_layout, state_dict.get(prefix + LAYOUT))
        weights = {name: tensor for name, tensor in state_dict.items() if name != prefix + LAYOUT}
        super()._load_from_state_dict(weights, prefix, *rest)


def compare_layouts(layer: str, own: Tensor | None, stored: Tensor | None) -> None:
    """Raise CheckpointError unless a layer's layout, `own`, is the one `stored` with its weights."""
    if stored is not None and (stored.dtype != torch.int64 or stored.shape[1:] != (2,)):
        got = f"{stored.dtype} {list(stored.shape)}"
        raise CheckpointError(f"{layer}.{LAYOUT} must be int64 [heads, 2], got {got}: the file is damaged")
    here, there = ([] if each is None else each.tolist() for each in (own, stored))
    if here != there:
        heads = _listed(there) if _listed(there) != _listed(here) else "other patterns"
        raise CheckpointError(
            f"{layer}: the state dict has {heads}, this layer has {_listed(here)}; freeze or prune the same heads "
            "first, as saf.load does, or undo with saf.uninstall_"
        )


def _listed(rows: list[list[int]]) -> str:
    """Return "frozen heads [0, 1]" and those of other kinds, "frozen heads none" where there are not any."""
    by_kind = {kind: [head for head, row in enumerate(rows) if row[0] == n] for n, kind in enumerate(KINDS)}
    edited = {kind: heads for kind, heads in by_kind.items() if kind == "frozen" or (heads and kind in EDITED)}
    return ", ".join(f"{kind} heads {heads or 'none'}" for kind, heads in edited.items())


def _digest(pattern: Pattern) -> int:
    """Return 63 bits of a hash of a pattern's tensors."""
    digest = hashlib.sha256()
    for name, tensor in sorted(pattern.state().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().data)
    return int.from_bytes(digest.digest()[:8], "big") >> 1
