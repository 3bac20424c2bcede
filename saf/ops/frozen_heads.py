"""`FrozenHeads`: the frozen heads of one layer, as tables of their backend.

`choose_backend` has the rule of `"auto"`; `for_graphs` tells layers that a CUDA graph will replay their launches.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from saf.errors import InputError, UnsupportedError, check_name
from saf.ops.backend import Backend, Reference, Tables, uses_triton
from saf.ops.fused import Fused
from saf.ops.linear import Linear
from saf.ops.toeplitz import Toeplitz
from saf.patterns import Pattern, is_trainable, pattern_for_each_head

BACKENDS: dict[str, Backend] = {
    "toeplitz": Toeplitz(), "linear": Linear(), "fused": Fused(), "reference": Reference(),
}  # fmt: skip
# What "auto" tries in turn. It never takes `fused`, the paper's execution: with 25% frozen an update at 4K is 0.971x as
# fast as an ordinary one by `fused`, 1.081x by `toeplitz` (docs/log.md).
AUTO_ORDER = ("toeplitz", "reference")


class FrozenPart(NamedTuple):
    """Fixed patterns of a layer that one backend executes: their slots among the frozen ones, and their tables."""

    backend: Backend
    slots: tuple[int, ...]
    tables: Tables


class FrozenHeads(nn.Module):
    """Execute the patterns of a layer's frozen heads, for up to `max_length` positions; build it with `from_patterns`.

    Fixed patterns are tables, computed once; trainable ones are modules `pattern_SLOT` whose parameters alpha and rho
    are read in every forward pass. When the model is cast, buffers and parameters keep their dtype, and tables for
    values of the new dtype are added where the backend has them. Buffers and parameters move with the model.
    """

    def __init__(self, patterns: list[Pattern], backend: str, max_length: int, kv_head: tuple[int, ...] | None):
        super().__init__()
        self.trainable = tuple(slot for slot, one in enumerate(patterns) if one.trainable)  # slots of these patterns
        # Fixed ones stay on the CPU in their own precision: tables of another dtype are computed from them, never cast.
        self.patterns = [one if one.trainable else one.to(device="cpu") for one in patterns]
        self.num_frozen = len(patterns)
        self.backend, self.max_length, self.kv_head = backend, max_length, kv_head
        self.replayed = False  # whether a CUDA graph launches what a call launches; `for_graphs` sets it
        # The slots of fixed patterns that each backend executes: "linear" leaves other kinds to "toeplitz".
        self.groups: dict[str, tuple[int, ...]] = {}
        for slot, one in enumerate(patterns):
            if is_trainable(one):  # a child module, so that its parameters are the model's
                self.add_module(f"pattern_{slot}", one)
            else:
                name = "toeplitz" if backend == "linear" and one.kind != "exponential" else backend
                self.groups[name] = (*self.groups.get(name, ()), slot)
        self.dtypes: tuple[torch.dtype, ...] = ()  # of values that tables were prepared for
        # A backend's tables for one dtype, by (dtype, backend). A tensor is a buffer, and its entry that buffer's name;
        # other entries, such as tuples of slots, are stored as they are.
        self._tables: dict[tuple[torch.dtype, str], dict[str, Any]] = {}

    @classmethod
    def from_patterns(
        cls, pattern: Pattern | Sequence[Pattern], *, backend: str = "auto",
        dtype: torch.dtype | Sequence[torch.dtype] = torch.float32, device: torch.device | str = "cpu",
        kv_head: Sequence[int] | Tensor | None = None,
    ) -> "FrozenHeads":  # fmt: skip
        """Prepare patterns over `[F, T]`, in head order, for values of `dtype` (one or several).

        A list may mix all kinds of patterns; trainable ones keep their parameters. `kv_head [H]` names the value head
        that each slot reads; without it slots and value heads correspond one to one. Raises InputError on unequal
        lengths and UnsupportedError when a named backend cannot run here, or cannot train a pattern.
        """
        patterns, device = pattern_for_each_head(pattern), torch.device(device)
        lengths = {one.length for one in patterns}
        if len(lengths) != 1:
            found = f"frozen heads of a layer need patterns of one length, got {sorted(lengths)}"
            raise InputError(f"{found}: calibrate every event on the length of the first one")
        dtypes = (dtype,) if isinstance(dtype, torch.dtype) else tuple(dtype)
        read = None if kv_head is None else tuple(map(int, kv_head))
        if read is not None and (len(read) < len(patterns) or min(read) < 0):
            raise InputError(f"kv_head must name one value head per slot, from 0, {len(patterns)} frozen; got {read}")
        trainable = any(one.trainable for one in patterns)
        exponential = any(one.kind == "exponential" for one in patterns)
        name = choose_backend(backend, device=device, dtypes=dtypes, trainable=trainable, exponential=exponential)
        frozen = cls(patterns, name, lengths.pop(), read)
        for each in dtypes if trainable else ():
            alpha, rho = frozen.logits()
            if reason := BACKENDS[name].untrainable_reason(alpha.detach(), rho.detach(), each):
                raise UnsupportedError(f"backend {name!r} cannot train these patterns: {reason}")
        for trained in frozen.children():
            trained.to(device)
        frozen._prepare(patterns, dtypes, device)
        return frozen

    def _prepare(self, patterns: Sequence[Pattern], dtypes: Sequence[torch.dtype], device: torch.device) -> None:
        """Add the backends' tables of the fixed ones among `patterns` for values of some dtypes."""
        self.dtypes = tuple(dict.fromkeys((*self.dtypes, *dtypes)))
        for name, slots in self.groups.items():
            kv_head = None
            if self.kv_head is not None:
                # Every backend gets the live slots, which it may compute too, and of the frozen ones its own.
                live_kv, frozen_kv = self.kv_head[: -self.num_frozen], self.kv_head[-self.num_frozen :]
                kv_head = (*live_kv, *(frozen_kv[slot] for slot in slots))
            fixed = [patterns[slot] for slot in slots]
            # Tensors of inference mode could not take part in training later.
            with torch.inference_mode(False), torch.no_grad():
                prepared = BACKENDS[name].prepare(fixed, dtypes, device, kv_head)
            for dtype, tables in prepared.items():
                self._add_tables(dtype, name, tables)

    def _add_tables(self, dtype: torch.dtype, backend: str, tables: Tables) -> None:
        """Register the tensors among tables as buffers, so that they move with the model; store the rest."""
        prefix = f"{str(dtype).removeprefix('torch.')}_{backend}"
        stored = self._tables[dtype, backend] = dict(tables)
        for name, table in tables.items():
            if isinstance(table, Tensor):
                stored[name] = f"{prefix}_{name}"
                # Not persistent: a state dict has patterns' parameters at most, and tables follow from patterns.
                self.register_buffer(stored[name], table, persistent=False)

    def parts(self, dtype: torch.dtype) -> list[FrozenPart]:
        """Return the fixed patterns by backend; raise InputError where none were prepared for values of `dtype`."""
        if dtype not in self.dtypes:
            names = " or ".join(map(str, self.dtypes))
            raise InputError(
                f"values must be {names}, which frozen heads were prepared for, got {dtype}: cast the model, or pass "
                f"dtype={dtype} to from_patterns"
            )
        return [FrozenPart(BACKENDS[name], slots, self.tables(dtype, name)) for name, slots in self.groups.items()]

    def tables(self, dtype: torch.dtype, backend: str | None = None) -> Tables:
        """Return the tables of a backend, by default `self.backend`, for values of `dtype`."""
        stored = self._tables[dtype, backend or self.backend]
        return {name: self._buffers[table] if isinstance(table, str) else table for name, table in stored.items()}

    def logits(self) -> tuple[Tensor, Tensor]:
        """Return alpha and rho of the trainable patterns, `[trainable, T]` each."""
        patterns = [one for one in self.children() if is_trainable(one)]
        return torch.stack([one.alpha for one in patterns]), torch.stack([one.rho for one in patterns])

    def compile_key(self) -> tuple[Any, ...]:
        """Return what code compiled for these heads depends on besides the shapes and dtypes of tensors."""
        tables = tuple((*key, *sorted(stored.items())) for key, stored in self._tables.items())
        return self.backend, self.max_length, self.kv_head, self.trainable, self.num_frozen, self.replayed, tables

    @property
    def allocated(self) -> int:
        """Return the bytes of memory that tables and trained logits take, shared memory counted once."""
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
        # Operators would compute nothing from tables on "meta", and say nothing; without tables any device serves.
        if (device := self._device()) is not None and value.device != device:
            where = f"values are on {value.device}, the frozen heads' tables on {device}"
            raise InputError(f"{where}; move the model as a whole, and do not offload buffers")

    def _device(self) -> torch.device | None:
        """Return where the tables or the trained logits are; None while there are none."""
        for table in self._buffers.values():  # every call passes here: a walk over modules costs the host time
            if table is not None:
                return table.device
        return next((logits.device for logits in self.parameters()), None)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FrozenHeads":
        """Follow the module to another device; keep every dtype, and add tables for the one that values will have."""
        before = self._device() or torch.device("cpu")
        for pattern in self.children():
            pattern._apply(fn)
        for name, table in list(self._buffers.items()):
            if table is not None:  # `fn` may cast too: an empty tensor shows the device alone
                self._buffers[name] = table.to(fn(table.new_empty(0, dtype=torch.float32)).device)
        device = self._device() or torch.device("cpu")
        cast = [fn(torch.empty(0, dtype=dtype, device=device)).dtype for dtype in self.dtypes]
        dtypes = [dtype for dtype in cast if dtype not in self.dtypes]
        if {before.type, device.type} == {"cpu", "cuda"}:
            # All tables are prepared anew, since kernels read others than plain PyTorch does. "meta" keeps what it has.
            dtypes = [*self.dtypes, *dtypes]
        backend = BACKENDS[self.backend]
        # A dtype that the backend does not take is left out: the cast succeeds, and `parts` refuses such values.
        dtypes = [dtype for dtype in dict.fromkeys(dtypes) if backend.unsupported_reason(device, dtype) is None]
        for key in [key for key in self._tables if key[0] in dtypes]:
            for table in self._tables.pop(key).values():
                if isinstance(table, str):
                    del self._buffers[table]
        if dtypes:
            self._prepare(self.patterns, dtypes, device)
        return self

    def extra_repr(self) -> str:
        return f"num_frozen={self.num_frozen}, max_length={self.max_length}, backend={self.backend!r}"


def beyond_patterns(length: int, longest: int) -> str:
    """Return the message for an input longer than the patterns of frozen heads."""
    return (
        f"input has {length} positions, the frozen heads' patterns cover {longest}: shorten it (in generate, the "
        "prompt or max_new_tokens), or freeze again with calibration sequences that long (--length)"
    )


@contextmanager
def for_graphs(model: nn.Module) -> Iterator[None]:
    """Let the layers of `model` take what is fastest in a CUDA graph: warm up and capture inside, replay anywhere.

    In a graph the host launches nothing, so that fewer prompts gain by one launch (`saf.ops.fused.HOST_BOUND`).
    Compilers guard on `replayed`: code compiled outside is compiled once more inside. Capture a program of its own
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
    check_name("backend", name, ("auto", *BACKENDS))
    candidates: tuple[str, ...] = (name,)
    if name == "auto":
        candidates = ("linear", *AUTO_ORDER) if exponential else AUTO_ORDER
    reasons = {}
    for candidate in candidates:
        backend = BACKENDS[candidate]
        reason = next(filter(None, (backend.unsupported_reason(device, dtype) for dtype in dtypes)), None)
        if trainable and not backend.trains:
            reason = "it has no gradients for key and distance logits (trainable=True)"
        if reason is None:
            return candidate
        reasons[candidate] = reason
    if name == "auto":
        raise UnsupportedError(f"no backend runs on {device} with values of dtype {list(dtypes)}: {reasons}")
    raise UnsupportedError(f"backend {name!r} cannot run: {reasons[name]}; use backend='auto' or another one")


def explain(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> list[str]:
    """Return lines with the rule of `"auto"`, its choice for a device and dtype, and what each backend would do."""
    device, order = torch.device(device), ", ".join(AUTO_ORDER)
    rule = f"linear for layers with exponential patterns, else the first of {order}, that supports device and dtype"
    lines = [f"rule: {rule}"]
    for name, backend in BACKENDS.items():
        reason = backend.unsupported_reason(device, dtype)
        framework = "Triton" if uses_triton(device, dtype) else "PyTorch"
        how = backend.how.format(framework) if reason is None else f"no: {reason}"
        lines.append(f"{name} on {device.type}, {str(dtype).removeprefix('torch.')}: {how}")
    return [*lines, f"auto: {choose_backend('auto', device=device, dtypes=[dtype])}"]
