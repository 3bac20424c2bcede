"""The models that benchmarks time: `ModelPlan` builds each arm's model from a preset or a folder.

Frozen heads of presets have synthetic patterns shaped like trained ones. A folder (a checkpoint, a run, the output of
`saf.save` or `save_pretrained`) has frozen heads and patterns of its own: every arm has its weights, ordinary arms with
all heads live again.
"""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.special import expit, logit
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from saf.bench.protocol import FLEX, FREE, PRUNED, Arm
from saf.errors import InputError, UnsupportedError
from saf.heads import EDITED, Head, HeadSet
from saf.models import GPT, GPTConfig, preset
from saf.models.adapter import adapter_for, longest_input
from saf.models.gpt import BASE, PRESETS, LiveAttention
from saf.opening import find_source
from saf.ops import BACKENDS
from saf.ops.backend import Backend, Tables
from saf.ops.heads import take_heads
from saf.ops.positions import CachePosition
from saf.patterns import CompactPattern, ExponentialPattern, Pattern
from saf.records.run import is_transformers_model
from saf.surgery import finalize_, install_, patterns_of, prune_, uninstall_

# --- shapes


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int


# llama-124m has the layers, heads and channels of GPT-2's small model; its gated MLP has as many weights as that
# model's. llama-7b has the sizes of Llama-2-7B.
TRANSFORMERS: dict[str, tuple[str, ModelShape, int, int]] = {
    "llama-124m": ("Llama", ModelShape(12, 12, 12, 64, 50_304), 768, 2_048),
    "llama-7b": ("Llama", ModelShape(32, 32, 32, 128, 32_000), 4_096, 11_008),
    "qwen3-4b": ("Qwen3", ModelShape(36, 32, 8, 128, 151_936), 2_560, 9_728),
}
"""Family, sizes, and channels of a layer and of its MLP of each preset of transformers."""


def shape_of(name: str, length: int, num_layers: int | None = None) -> ModelShape:
    """Return the shape of a preset at a context; raise InputError for an unknown name."""
    if name in TRANSFORMERS:
        shape = TRANSFORMERS[name][1]
        return replace(shape, num_layers=num_layers or shape.num_layers)
    config = _config(name, length, num_layers)
    return ModelShape(config.num_layers, config.num_heads, config.num_heads, config.head_dim, config.vocab_size)


def _config(name: str, length: int, num_layers: int | None) -> GPTConfig:
    if name not in PRESETS:
        known = ", ".join(sorted([*PRESETS, *TRANSFORMERS]))
        raise InputError(f"model must be a folder or one of {known}; got {name!r}")
    layers = {} if num_layers is None else {"num_layers": num_layers}
    return preset(name, max_length=length, **layers)


# --- a folder's model


@dataclass(frozen=True, kw_only=True)
class FolderModel:
    """The edited heads of a model in a folder, with their patterns and the backend that executes them."""

    shape: ModelShape
    frozen: Mapping[Head, Pattern]
    pruned: HeadSet
    backend: str | None
    """None where no head is frozen."""
    longest: int | None
    own_decoder: bool
    """Whether it is this project's `GPT` rather than a model of transformers."""

    @property
    def rate(self) -> float:
        return (len(self.frozen) + len(self.pruned)) / (self.shape.num_layers * self.shape.num_heads)


def is_folder(model: str) -> bool:
    """Return whether a benchmark's model is a folder or a name on the Hugging Face hub, and no preset."""
    return model not in PRESETS and model not in TRANSFORMERS and (Path(model).exists() or is_transformers_model(model))


@lru_cache(maxsize=1)
def read_folder(folder: str, device: torch.device) -> FolderModel:
    """Read the shape and the edited heads of a folder's model; raise InputError where no head is edited."""
    model = find_source(folder).model(device)
    adapter = adapter_for(model)
    sites, vocabulary = adapter.sites(), adapter.vocab_size
    if not len(adapter.heads(*EDITED)):
        raise InputError(f"{folder} has no frozen or pruned heads; freeze some by `saf freeze`, or name a preset")
    frozen = {(layer, head): each for layer, site in enumerate(sites) for head, each in patterns_of(site).items()}
    if any(pattern.trainable for pattern in frozen.values()):
        raise UnsupportedError(f"{folder} has trainable patterns; fix them by pattern.compact() first")
    # A benchmark's tables have one shape for all layers, and its random tokens need a vocabulary.
    layers = {(site.layout.num_heads, site.layout.num_kv_heads, site.head_dim) for site in sites}
    if len(layers) > 1 or vocabulary is None:
        raise UnsupportedError(f"{folder} has layers of different heads, or no vocabulary; time a preset of its shape")
    result = FolderModel(
        shape=ModelShape(len(sites), *layers.pop(), vocabulary),
        frozen=frozen,
        pruned=adapter.heads("pruned"),
        backend=next((site.frozen.backend for site in sites if site.frozen is not None), None),
        longest=longest_input(model),
        own_decoder=adapter.saves_weights,
    )
    del model, adapter, sites
    gc.collect()  # models with frozen heads are in reference cycles: an arm would be charged with their memory
    return result


def _ordinary_of(folder: str, device: torch.device) -> nn.Module:
    """Return a folder's model with all heads live again; all its weights are random where removed rows are gone."""
    model = find_source(folder).model(device)
    try:
        uninstall_(model)
    except InputError:
        adapter = adapter_for(model)
        if not adapter.saves_weights:
            raise
        # Rows are gone after `finalize_`. No time depends on the values of weights.
        model = GPT.skip_init(adapter.model.config, device)
        model.reset_parameters(torch.Generator(device).manual_seed(0))
    return model


# --- the models of one point of a benchmark: a context and batch size


@dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """The models of one point: their shape, the heads that each arm freezes, and `build` for each arm's model."""

    model: str
    length: int
    device: torch.device
    seed: int = 0
    num_layers: int | None = None

    def __post_init__(self):
        # Checked here, so that a wrong name or length raises before a record is begun.
        if self.folder is None:
            shape_of(self.model, self.length, self.num_layers)
        elif self.length > (self.folder.longest or self.length):
            longest = self.folder.longest
            raise InputError(
                f"{self.model} takes at most {longest} tokens, got {self.length}: give --points {longest}x1"
            )

    @cached_property
    def folder(self) -> FolderModel | None:
        return read_folder(self.model, self.device) if is_folder(self.model) else None

    @cached_property
    def shape(self) -> ModelShape:
        return self.folder.shape if self.folder else shape_of(self.model, self.length, self.num_layers)

    @property
    def own_decoder(self) -> bool:
        """As `FolderModel.own_decoder`."""
        return self.folder.own_decoder if self.folder else self.model not in TRANSFORMERS

    @property
    def name(self) -> str:
        """The model's name for a row, with the number of layers where it was set."""
        return self.model + ("" if self.num_layers is None else f", {self.num_layers} layers")

    def heads(self, arm: Arm) -> tuple[HeadSet, HeadSet]:
        """Choose the heads that an arm freezes, and those that it prunes."""
        if arm.backend is None:
            return HeadSet(), HeadSet()
        if self.folder:
            edited, pruned = HeadSet(self.folder.frozen) | self.folder.pruned, self.folder.pruned
        else:
            edited, pruned = self._drawn_heads(arm.rate), HeadSet()
        # Heads pruned in the folder stay pruned in these arms; the arm "pruned" prunes its frozen heads, too.
        return (HeadSet(), edited) if arm.backend == PRUNED else (edited - pruned, pruned)

    def _drawn_heads(self, rate: float) -> HeadSet:
        shape, generator = self.shape, torch.Generator().manual_seed(self.seed)
        counts = heads_per_layer(num_layers=shape.num_layers, num_heads=shape.num_heads, rate=rate)
        drawn = [torch.randperm(shape.num_heads, generator=generator)[:count].tolist() for count in counts]
        return HeadSet((layer, head) for layer, some in enumerate(drawn) for head in some)

    def describe(self, arm: Arm) -> dict[str, Any]:
        """Return the entries of a row about an arm's heads."""
        frozen, pruned = self.heads(arm)
        counts = [len((frozen | pruned).in_layer(layer)) for layer in range(self.shape.num_layers)]
        return {"heads": sum(counts), "per_layer": counts}

    def tokens(self, count: int, batch_size: int, *, seed: int | None = None) -> list[tuple[Tensor, Tensor]]:
        """Draw `count` micro-batches of inputs and targets, each `[batch_size, length]`, on the device."""
        generator = torch.Generator().manual_seed(self.seed if seed is None else seed)
        size = (count, batch_size, self.length + 1)  # targets are the inputs, one token later
        windows = torch.randint(self.shape.vocab_size, size, generator=generator).to(self.device)
        return [(window[:, :-1], window[:, 1:]) for window in windows]

    def build(self, arm: Arm, dtype: torch.dtype = torch.float32) -> nn.Module:
        """Build an arm's model; all arms have the same weights.

        Raises UnsupportedError for a backend or kernel that cannot run here.
        """
        if arm.kernel == FLEX and not (self.own_decoder and arm.backend is None):
            raise UnsupportedError("flex is measured for ordinary attention of this project's decoder only")
        model = self._ordinary(dtype)
        frozen, pruned = self.heads(arm)
        if len(pruned):
            prune_(model, pruned)
            finalize_(model)  # without the removed rows, whose memory a trained model would not have
        if len(frozen):
            if self.folder:
                patterns: Any = [self.folder.frozen[head] for head in frozen]
            else:
                patterns = drawn_patterns(arm.backend, len(frozen), self.length, self.seed, self.device)
            install_(model, frozen, patterns, backend=str(arm.backend))
        adapter = adapter_for(model)
        # In ordinary arms too: else a ratio would contain the difference in Python time of two attention functions.
        adapter.use_saf_attention()
        for site in adapter.sites():
            site.pin(arm.kernel if site.frozen is None else arm.live_kernel)
        if arm.kernel == FLEX:
            blocks = causal_blocks(self.length, self.device)
            for layer in model.attention_layers():  # type: ignore[operator]
                layer.live = FlexAttention(blocks)
        return model

    def _ordinary(self, dtype: torch.dtype) -> nn.Module:
        if self.folder:
            return _ordinary_of(self.model, self.device).to(dtype)
        generator = torch.Generator(self.device).manual_seed(self.seed)
        if self.own_decoder:
            model = GPT.skip_init(_config(self.model, self.length, self.num_layers), self.device)
            model.reset_parameters(generator)
            return model.to(dtype)
        from saf.hf.families import random_model  # imports transformers, which presets of this project do not need

        family, _, hidden_size, intermediate_size = TRANSFORMERS[self.model]
        shape = self.shape
        return random_model(
            family,
            max_length=self.length,
            device=self.device,
            dtype=dtype,
            generator=generator,
            num_hidden_layers=shape.num_layers,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            vocab_size=shape.vocab_size,
        )


# --- which heads, and their patterns

MEASURED_SHARES = np.array((8, 7, 3, 5, 2, 4, 2, 2, 1, 2, 0, 0)) / 12
"""Share of each layer's heads that variance selection takes at 25% in a trained 124M model with rotary positions."""
SMALLEST_SHARE = 0.01
"""A layer with no head or all heads taken counts as this: its log odds are finite then."""


def heads_per_layer(*, num_layers: int, num_heads: int, rate: float) -> list[int]:
    """Choose how many heads of each layer are frozen; they add up to `round(rate * num_layers * num_heads)`.

    They follow `MEASURED_SHARES` over relative depth, its log odds shifted to the rate.
    """
    total = round(rate * num_layers * num_heads)
    shares = np.full(num_layers, rate)
    # Where no head or every head is frozen, there is nothing to choose, and the log odds would be infinite. Otherwise
    # counts differ: at 25%, selection takes two thirds of the first layer and none of the last two.
    if 0 < total < num_layers * num_heads:
        depth = (np.arange(num_layers) + 0.5) / num_layers * len(MEASURED_SHARES) - 0.5
        measured = np.interp(depth, np.arange(len(MEASURED_SHARES)), MEASURED_SHARES)
        odds = logit(measured.clip(SMALLEST_SHARE, 1 - SMALLEST_SHARE))
        shares = expit(odds + brentq(lambda shift: expit(odds + shift).sum() - total / num_heads, -50, 50))
    # Round down, then add the rest by largest remainders. 1e-6 is more than the errors of `brentq` and floating point,
    # which may leave a count just below a whole number.
    counts = shares * num_heads
    whole = np.minimum((counts + 1e-6).astype(int), num_heads)
    order = np.argsort(whole - counts, kind="stable")
    while whole.sum() < total:
        for layer in order:
            if whole.sum() < total and whole[layer] < num_heads:
                whole[layer] += 1
    return whole.tolist()


def drawn_patterns(backend: str | None, count: int, length: int, seed: int, device: torch.device) -> Any:
    """Draw patterns for a backend: exponential ones for "linear", compact ones for others."""
    generator = torch.Generator().manual_seed(seed)
    if backend == "linear":
        return exponential_patterns(count, length, generator)
    return synthetic_patterns(count, length, generator, device)


def synthetic_patterns(
    count: int, length: int, generator: torch.Generator, device: torch.device | str = "cpu"
) -> CompactPattern:
    """Draw `count` compact patterns `[count, length]`: flat key logits with a sink, smooth decay, a rotary ripple.

    `generator` lives on the CPU; normalisers are computed on `device`.
    """
    # Round numbers that give this shape, not measured ones.
    position = torch.arange(length, dtype=torch.float64, device=device)
    slope, ripple, pair = torch.rand(3, count, 1, dtype=torch.float64, generator=generator).to(device)
    frequency = BASE ** -(0.05 + 0.4 * pair)
    rho = -(0.3 + 0.9 * slope) * torch.log1p(position) + 0.3 * ripple * torch.cos(frequency * position)
    alpha = 0.1 * torch.randn(count, length, dtype=torch.float64, generator=generator).to(device)
    alpha[:, 0] += 3.0  # the attention sink: each key gets exp(alpha), the first one twenty times as much
    return CompactPattern.from_parameters(alpha, rho)


BAND, PAIRS = 128, 16
"""Distances with a weight of their own, and damped cosines, of drawn exponential patterns: the defaults of the fit."""


def exponential_patterns(count: int, length: int, generator: torch.Generator) -> ExponentialPattern:
    """Draw `count` exponential patterns: a sink, a band, two decays and damped cosines of a third of their weight."""
    damping, frequency, cosine, sine = torch.rand(4, count, PAIRS, dtype=torch.float64, generator=generator)
    damping, frequency = damping / 400 + 1 / 4000, 0.4 * frequency
    cosine, sine = (0.2 / PAIRS) * (2 * cosine - 1), (0.2 / PAIRS) * (2 * sine - 1)
    # The first two pairs do not oscillate: decays over 4,000 and over 40 positions.
    damping[:, 0], damping[:, 1], frequency[:, :2], sine[:, :2] = 1 / 4000, 1 / 40, 0, 0
    cosine[:, :2] = torch.tensor([0.3, 0.7])
    near = 3 - (torch.arange(min(BAND, length)) / 8).clamp(max=3).double()
    alpha = 0.1 * torch.randn(count, min(16, length), dtype=torch.float64, generator=generator)
    alpha[:, 0] += 3.0
    trend, trend_damping = alpha.new_zeros(count, 1), alpha.new_ones(count, 1)
    band = near.repeat(count, 1)
    return ExponentialPattern(alpha, band, damping, frequency, cosine, sine, length, trend, trend_damping)


# --- flex attention as a baseline, and the free bound

BLOCK = 128
"""Positions of a block of the mask, flex attention's default."""


def causal_blocks(length: int, device: torch.device) -> BlockMask:
    """Build the causal block mask of `length` positions: flex masks blocks on the diagonal, not those below it."""
    # Not PyTorch's `create_block_mask`, which fills a matrix of length x length first: 4 GiB at 64K.
    count = -(-length // BLOCK)
    row = torch.arange(count, dtype=torch.int32, device=device)
    diagonal = row[:, None].expand(count, count).contiguous()[None, None]
    below = row[None].expand(count, count).contiguous()[None, None]
    ones, lengths = torch.ones_like(row)[None, None], (length, length)
    return BlockMask.from_kv_blocks(
        ones, diagonal, row[None, None].clone(), below, BLOCK_SIZE=BLOCK, mask_mod=_causal, seq_lengths=lengths
    )


def _causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


class FlexAttention(LiveAttention):
    """Flex attention in place of an ordinary layer's attention; it runs as one kernel only if it is compiled."""

    def __init__(self, blocks: BlockMask):
        super().__init__()
        self.blocks = blocks

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, ...]:
        grouped = query.shape[1] != key.shape[1]
        output: Any = flex_attention(query, key, value, block_mask=self.blocks, enable_gqa=grouped)
        return (output,)


class FreeBackend(Backend):
    """Frozen heads that cost nothing: values pass through unmixed. Its speedup is the most that freezing can reach."""

    how = "values pass through unmixed (a bound for measurements, not a model)"

    def prepare(self, patterns: Sequence[Pattern], dtypes: Sequence[torch.dtype], *_: Any) -> dict[torch.dtype, Tables]:
        return {dtype: {} for dtype in dtypes}

    def forward(self, value: Tensor, heads: tuple[int, ...], tables: Tables, left_pad: Tensor | None = None) -> Tensor:
        return take_heads(value, heads)

    def rows(self, value: Tensor, heads: tuple[int, ...], tables: Tables, position: CachePosition) -> Tensor:
        at = torch.arange(position.count, device=value.device) + position.first
        return take_heads(value.index_select(2, at), heads)


@contextmanager
def free_backend() -> Iterator[None]:
    """Register `FreeBackend` as the backend "free" while something is measured; "auto" never takes it."""
    BACKENDS[FREE] = FreeBackend()
    try:
        yield
    finally:
        del BACKENDS[FREE]
