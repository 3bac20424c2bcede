"""How far execution is from float64, for comparison with the paper's gradient table, and within which limits.

A layer, frozen and pruned, and its frozen heads alone are compared with the exact result in float64: the output and
every gradient. Limits follow the unfrozen layer, or PyTorch's own attention at the same shape; eager attention in the
same precision is the paper's comparison. With `--transitions N` a model's heads are also frozen, pruned and undone N
times, and its logits compared with those of a new model in each state.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import command
from saf.bench.layer import TOLERANCE
from saf.bench.protocol import DTYPES, require
from saf.bench.record import Session
from saf.heads import ROLES, Head, HeadLayout, HeadSet
from saf.machine import Execution
from saf.models import GPT, GPTConfig
from saf.models.gpt import BASE, Rotary, rotate
from saf.ops import BACKENDS, FrozenHeads, choose_backend, frozen_attention, live_attention, mixed_attention
from saf.ops.tensors import flat_heads
from saf.patterns import CompactPattern
from saf.surgery import install_, prune_, uninstall_
from saf.synthetic import synthetic_patterns

TENSORS = ("output", "input", "value", "query projection", "key projection", "value projection", "output projection")
"""The output, the gradients to input and values, and those to the four weights."""
SDPA_FACTOR = 2.0
"""Largest multiple of the error of PyTorch's own attention at the same shape; `TOLERANCE` bounds it too."""
LAYER_FACTOR = 1.1
"""Largest multiple of the unfrozen layer's error, under bfloat16 autocast."""
NORM_FLOOR = 1e-8
"""Under the norm of the exact result, as in the paper's table."""

Errors = dict[str, float]
Row = dict[str, Any]


@dataclass(kw_only=True)
class Accuracy:
    """Measure errors against float64; by default of the paper's case."""

    length: int = 129
    """Tokens of an input."""
    stored: int = 192
    """Positions that the patterns cover."""
    batch_size: int = 2
    """Sequences of an input."""
    num_heads: int = 4
    """Heads of the layer."""
    head_dim: int = 64
    """Channels of a head."""
    frozen: tuple[int, ...] = (1, 3)
    """Frozen heads, counted from 0."""
    backends: tuple[str, ...] = ()
    """Backends of frozen heads; by default every one that runs on the device."""
    precisions: tuple[Literal["fp32", "bf16"], ...] = ("fp32", "bf16")
    """fp32 throughout; bf16 autocast over fp32 weights (operators: operands in bf16)."""
    transitions: int = 0
    """Freeze, prune and undo heads of a model so many times too, in fp32."""
    seed: int = 0
    """Random seed for weights, inputs and patterns."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on; auto is CUDA if there is one."""


def measure(settings: Accuracy, *, out: Path | None = None) -> Row:
    """Return the record: rows of `max_abs` and `relative_l2`, the baseline's as `beside`, `eager`'s, `limit`, `within`.

    Raises:
        InputError: Sizes that fit no layer, or an unknown backend.
        UnsupportedError: A device that is not there, or a named backend that cannot run on it.
    """
    fits = 1 <= settings.length <= settings.stored and settings.head_dim % 2 == 0
    require(fits, f"length must be 1 to stored={settings.stored} and head_dim even; got {settings.length}")
    execution = Execution.of(settings.device, compile="off")
    with Session("errors", asdict(settings), execution, out=out) as session:
        layer = Layer.draw(settings, execution.device)
        for precision in settings.precisions:
            for backend in (None, *usable_backends(session, settings, precision)):
                rows = [*layer_rows(settings, layer, backend, precision)]
                if backend is not None:
                    rows += operator_rows(settings, layer, backend, precision)
                    # In bf16 the rounding of the model would hide a wrong state.
                    if settings.transitions and precision == "fp32":
                        rows.append(transitions_row(settings, backend, execution.device))
                session.add([{"backend": backend, "precision": precision, **row} for row in rows])
                worst = max(row["relative_l2"] / row["limit"] for row in rows)
                session.log(f"{backend or 'pruned'} {precision}: at most {worst:.2f} of the limit")
    return session.record


def above_limits(record: Mapping[str, Any]) -> list[str]:
    """Name the rows of a record that are above their limits."""
    return [
        f"{row['part']} {row['backend'] or ''} {row['precision']} {row['tensor']}: {row['relative_l2']:.2e} above "
        f"{row['limit']:.2e}"
        for row in record["rows"]
        if not row["within"]
    ]


def usable_backends(session: Session, settings: Accuracy, precision: str) -> Iterator[str]:
    """Yield the named backends, which must run, or those that do."""
    device, dtype = session.execution.device, DTYPES[precision]
    for name in settings.backends or BACKENDS:
        if not settings.backends and (reason := BACKENDS[name].unsupported_reason(device, dtype)):
            session.skip(f"{name} {precision}", reason)
        else:
            yield choose_backend(name, device=device, dtypes=[dtype])


def layer_rows(settings: Accuracy, layer: "Layer", backend: str | None, precision: str) -> Iterator[Row]:
    """Yield a row for each tensor of a whole layer; without a backend the layer is pruned."""
    autocast = torch.bfloat16 if precision == "bf16" else None
    pruned = backend is None
    exact = layer.eager(frozen=not pruned, pruned=pruned, dtype=torch.float64)
    eager = layer.eager(frozen=not pruned, pruned=pruned, autocast=autocast)
    result = layer.model(backend=backend, pruned=pruned, autocast=autocast)
    unfrozen = layer.model(backend=None, autocast=autocast)
    unfrozen_exact = layer.eager(frozen=False, dtype=torch.float64)
    for name in TENSORS:
        errors, baseline = distance(result[name], exact[name]), distance(unfrozen[name], unfrozen_exact[name])
        limit = LAYER_FACTOR * baseline["relative_l2"]
        if autocast is None:
            # In float32 rounding is near the limit of operators anyway: a lucky unfrozen layer does not lower it.
            limit = max(limit, TOLERANCE[torch.float32])
        part = "pruned layer" if pruned else "layer"
        yield row_of(part, name, errors, baseline, limit, eager=distance(result[name], eager[name]))


def operator_rows(settings: Accuracy, layer: "Layer", backend: str, precision: str) -> Iterator[Row]:
    """Yield a row for each tensor of the frozen heads alone, with PyTorch's attention at the same shape as baseline."""
    shape = (settings.batch_size, layer.heads.num_frozen, settings.length, settings.head_dim)
    generator, dtype = torch.Generator().manual_seed(settings.seed + 1), DTYPES[precision]
    query, key, value, upstream = (torch.randn(shape, generator=generator).to(layer.x.device, dtype) for _ in range(4))
    frozen = FrozenHeads.from_patterns(layer.pattern, backend=backend, dtype=dtype, device=value.device)
    weights = layer.pattern.dense()[:, : settings.length, : settings.length]
    result = mixing_errors(lambda x: frozen_attention(x, frozen), weights, value, upstream)
    # PyTorch's attention mixes the same values by drawn queries and keys, and is held against its own exact softmax.
    scores = query.double() @ key.double().mT * settings.head_dim**-0.5
    softmax = scores.masked_fill(future(settings.length, value.device), -torch.inf).softmax(-1)
    baseline = mixing_errors(partial(live_attention, query, key), softmax, value, upstream)
    for name, errors in result.items():
        limit = min(TOLERANCE[dtype], SDPA_FACTOR * baseline[name]["relative_l2"])
        yield row_of("operator", name, errors, baseline[name], limit)


def mixing_errors(mix: Any, weights: Tensor, value: Tensor, upstream: Tensor) -> dict[str, Errors]:
    """Return the errors of `mix(value)` and of its gradient against exact `weights [..., T, T]`."""
    leaf = value.clone().requires_grad_()
    output = mix(leaf)
    (gradient,) = torch.autograd.grad(output, leaf, upstream)
    # O = P V, and so dV = P^T dO.
    return {
        "output": distance(output.detach(), weights @ value.double()),
        "value": distance(gradient, weights.mT @ upstream.double()),
    }


def distance(result: Tensor, exact: Tensor) -> Errors:
    """Return the largest absolute and the relative L2 error, with the paper's floor of 1e-8 under the norm."""
    error = result.double() - exact.double()
    norm = exact.double().norm().clamp(min=NORM_FLOOR)
    return {"max_abs": error.abs().max().item(), "relative_l2": (error.norm() / norm).item()}


def row_of(part: str, tensor: str, errors: Errors, baseline: Errors, limit: float, eager: Errors | None = None) -> Row:
    """Return the row of a tensor of a part; `beside` has the baseline's errors."""
    row = {"part": part, "tensor": tensor, **errors, "beside": baseline, "limit": limit}
    return row | {"within": errors["relative_l2"] <= limit, "eager": eager}


def future(length: int, device: torch.device) -> Tensor:
    """Return the mask of later positions, `[T, T]`."""
    return torch.ones(length, length, dtype=torch.bool, device=device).triu(1)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Float32 weights `[C, C]` by role, an input and an output gradient `[B, T, C]`, patterns `[F, stored]`."""

    heads: HeadLayout
    weights: dict[str, Tensor]
    x: Tensor
    upstream: Tensor
    pattern: CompactPattern

    @classmethod
    def draw(cls, settings: Accuracy, device: torch.device) -> "Layer":
        generator = torch.Generator().manual_seed(settings.seed)
        heads = HeadLayout(settings.num_heads, settings.num_heads, tuple(sorted(settings.frozen)))
        width = heads.num_heads * settings.head_dim

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device)

        weights = {role: normal(width, width) * width**-0.5 for role in ROLES}
        x, upstream = (normal(settings.batch_size, settings.length, width) for _ in range(2))
        pattern = synthetic_patterns(heads.num_frozen, settings.stored, generator, device)
        return cls(heads=heads, weights=weights, x=x, upstream=upstream, pattern=pattern)

    @property
    def head_dim(self) -> int:
        return self.x.shape[-1] // self.heads.num_heads

    def eager(
        self, *, frozen: bool, pruned: bool = False, dtype: torch.dtype = torch.float32, autocast: Any = None
    ) -> dict[str, Tensor]:
        """Run head by head with materialised patterns, as in Eqs. (1) and (3), in `dtype` or under autocast.

        With `pruned` instead of `frozen` the outputs of those heads are zero.
        """
        leaves = {role: weight.to(dtype, copy=True).requires_grad_() for role, weight in self.weights.items()}
        x = self.x.to(dtype, copy=True).requires_grad_()
        length = x.shape[1]
        fixed = self.pattern.dense()[:, :length, :length].to(dtype) * frozen  # all zero for pruned heads
        with torch.autocast(x.device.type, autocast, enabled=autocast is not None):
            query, key, value = (
                F.linear(x, leaves[role]).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for role in ROLES[:3]
            )
            value.retain_grad()
            scores = exact_rotation(query) @ exact_rotation(key).mT * self.head_dim**-0.5
            weights = list(scores.masked_fill(future(length, x.device), -torch.inf).softmax(-1).unbind(1))
            for place, head in enumerate(self.heads.frozen if frozen or pruned else ()):
                weights[head] = fixed[place].expand(x.shape[0], -1, -1)
            # Eq. (1), and with a fixed pattern Eq. (3): O = P V, head by head.
            mixed = torch.stack([each @ value[:, head] for head, each in enumerate(weights)], 2)
            output = F.linear(mixed.flatten(2), leaves["output"])
        output.backward(self.upstream.to(output.dtype))
        return named(output, x, value.grad, {role: leaf.grad for role, leaf in leaves.items()})

    def model(
        self, *, backend: str | None, autocast: torch.dtype | None = None, pruned: bool = False
    ) -> dict[str, Tensor]:
        """Run as a model does: live heads in PyTorch's attention, frozen ones (none without a backend) in a backend.

        With `pruned`, and no backend, those heads are left out, as pruning leaves their rows out of the weights.
        """
        device, frozen = self.x.device, None
        heads = replace(self.heads, frozen=(), pruned=self.heads.frozen if pruned else ())
        if backend:
            heads = self.heads
            options = {"dtype": autocast or torch.float32, "device": device, "kv_head": heads.kv_head}
            frozen = FrozenHeads.from_patterns(self.pattern, backend=backend, **options)
        # Indexing leaves gradients at the rows of the whole weights.
        leaves = {role: weight.clone().requires_grad_() for role, weight in self.weights.items()}
        channel, own = torch.arange(self.head_dim, device=device), {}
        for role, leaf in leaves.items():
            rows = (torch.tensor(heads.rows[role], device=device)[:, None] * self.head_dim + channel).flatten()
            own[role] = leaf[:, rows] if role == "output" else leaf[rows]
        x = self.x.clone().requires_grad_()
        rotation = Rotary(self.head_dim, x.shape[1]).to(device)(torch.arange(x.shape[1], device=device)[None])
        with torch.autocast(device.type, autocast, enabled=autocast is not None):
            parts = [F.linear(x, own[role]).unflatten(-1, (-1, self.head_dim)) for role in ROLES[:3]]
            query, key = (rotate(part, rotation).transpose(1, 2) for part in parts[:2])
            value = parts[2].transpose(1, 2)
            value.retain_grad()
            output = F.linear(flat_heads(mixed_attention(query, key, value, frozen)), own["output"])
        output.backward(self.upstream.to(output.dtype))
        assert value.grad is not None
        # Back into the order of the original heads, as `eager` has them.
        ordered = value.grad.new_zeros(x.shape[0], self.heads.num_heads, *value.grad.shape[2:])
        ordered[:, list(heads.slots)] = value.grad
        return named(output, x, ordered, {role: leaf.grad for role, leaf in leaves.items()})


def named(output: Tensor, x: Tensor, value: Tensor | None, weights: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Name the seven tensors; every gradient must be there."""
    tensors = [output.detach(), x.grad, value, *(weights[role] for role in ROLES)]
    # A missing gradient makes the list shorter, which `strict` refuses.
    return dict(zip(TENSORS, [tensor for tensor in tensors if tensor is not None], strict=True))


def exact_rotation(x: Tensor) -> Tensor:
    """Rotate both halves of the channels of `x [B, H, T, D]` by angles computed in float64."""
    length, dim = x.shape[-2:]
    frequency = BASE ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=x.device) / dim)
    angle = torch.arange(length, dtype=torch.float64, device=x.device)[:, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


# A model whose heads are frozen, pruned and undone many times over

VOCABULARY, LAYERS, MAX_HEADS = 64, 2, 3
"""Of the model; heads that one operation changes at most."""


def transitions_row(settings: Accuracy, backend: str, device: torch.device) -> Row:
    """Return the largest error of a model's logits after any operation; the baseline is the model before them all.

    The limit is that of operators: a single state's error is chance, the largest of many is at most a few times it.
    """
    # The paper's number is the largest of 50 states, 9.54e-7.
    first, *later = (distance(logits, exact) for logits, exact in states(settings, backend, device))
    worst = {name: max(each[name] for each in later) for name in first}
    limit = max(TOLERANCE[torch.float32], SDPA_FACTOR * first["relative_l2"])
    return row_of("transitions", f"logits, worst of {settings.transitions}", worst, first, limit)


def states(settings: Accuracy, backend: str, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the logits of a float32 model before any operation and after each, with the exact ones of its state.

    An operation freezes, prunes or undoes one to three heads, drawn from the seed. The exact logits are those of the
    same weights in float64, with the same heads frozen on the reference backend, or pruned, for the first time.
    """
    generator = torch.Generator().manual_seed(settings.seed)
    width = settings.num_heads * settings.head_dim
    sizes: Any = {"num_heads": settings.num_heads, "hidden_size": width, "max_length": settings.stored}
    config = GPTConfig(vocab_size=VOCABULARY, num_layers=LAYERS, **sizes)
    model = GPT(config).eval()
    model.reset_parameters(generator)
    # Before any operation, and on the CPU: float64 oracles do not depend on the device.
    weights = {name: value.double() for name, value in model.state_dict().items()}
    model.to(device)
    every = [(layer, head) for layer in range(LAYERS) for head in range(settings.num_heads)]
    patterns = synthetic_patterns(len(every), settings.stored, generator)
    tokens = torch.randint(VOCABULARY, (settings.batch_size, settings.length), generator=generator)
    kinds = dict.fromkeys(every, "live")

    def edit(edited: nn.Module, changes: dict[Head, str], backend: str) -> None:
        frozen, pruned = (HeadSet(head for head in changes if changes[head] == kind) for kind in ("frozen", "pruned"))
        if len(frozen):
            install_(edited, frozen, patterns[[every.index(head) for head in frozen]], backend=backend)
        if len(pruned):
            prune_(edited, pruned)

    def state() -> tuple[Tensor, Tensor]:
        # A new model each time: it can carry nothing over from the operations before.
        exact = GPT(config).double().eval()
        exact.load_state_dict(weights)
        edit(exact, kinds, "reference")
        with torch.no_grad():
            return model(tokens.to(device)).double().cpu(), exact(tokens)

    yield state()
    for _ in range(settings.transitions):
        change = draw_change(kinds, generator)
        if "live" in change.values():
            uninstall_(model, list(change))
        else:
            edit(model, change, backend)
        kinds |= change
        yield state()


def draw_change(kinds: dict[Head, str], generator: torch.Generator) -> dict[Head, str]:
    """Return some heads with their next kinds: live ones frozen or pruned, or others live again."""
    live = [head for head, kind in kinds.items() if kind == "live"]
    edited = [head for head, kind in kinds.items() if kind != "live"]
    number, choice = (int(torch.randint(n, (), generator=generator)) for n in (MAX_HEADS, 3))
    undo = bool(edited) and (not live or choice == 0)
    pool = edited if undo else live
    heads = [pool[place] for place in torch.randperm(len(pool), generator=generator)[: number + 1]]
    if undo:
        return dict.fromkeys(heads, "live")
    return dict.fromkeys(heads, "pruned" if choice == 1 else "frozen")


def failed(record: Row) -> int:
    """Print the rows above their limits; return 1 where there are some."""
    rows = above_limits(record)
    for row in rows:
        print(row, file=sys.stderr)
    return 1 if rows else 0


main = command(Accuracy, measure, prog="accuracy", exit_code=failed)

if __name__ == "__main__":
    sys.exit(main())
