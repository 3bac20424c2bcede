"""Output columns of frozen heads, refitted in closed form to write what their patterns miss, as far as they can."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from saf.adapters import Site, adapter_for, rows_of, unwrap
from saf.calibration.capture import Batch, check_heads, check_vocabulary, evaluation_mode, read_sequences
from saf.calibration.watch import Seen, modules_of, values_of, watch
from saf.errors import InputError
from saf.heads import Head
from saf.ops import FrozenHeads, frozen_attention, live_attention
from saf.ops.heads import flat_heads
from saf.patterns import Pattern, pattern_for_each_head

RIDGE = 1e-2
"""How much a change of the columns counts beside the error, as a share of the mean square of what the heads put out."""


def refit_output(
    model: nn.Module, batches: Iterable[Batch], heads: Iterable[Head], patterns: Pattern | Sequence[Pattern]
) -> dict[Head, Tensor]:
    """Return for each of `heads` the output columns `[D, C]` with which its pattern does most like its attention.

    Of each layer, with `Z` what its heads put out at one position and `Z~` what they would with their patterns, the new
    columns `W + dW` minimise the mean over all positions of `|Z W - Z~ (W + dW)|^2 + RIDGE * m * |dW|^2`, where m is
    the mean square of `Z~` (S.29). The layers are taken as they are before any head is frozen.

    Args:
        model: A supported model with these heads live, run in evaluation mode and left as it was.
        batches: Sequences `[B, T]` of the patterns' length, such as the calibration's own; of unequal lengths the
            longest has it, and every position counts alike.
        heads: The heads that are to be frozen, ascending.
        patterns: One for each.

    Returns:
        float64 on the CPU; D channels of a head, C of the residual stream.

    Raises:
        InputError: Heads that are not live, a wrong number of patterns, or sequences of another length.
        UnsupportedError: A model whose values cannot be seen.
    """
    adapter, sequences = adapter_for(model), read_sequences(batches)
    check_vocabulary(adapter, sequences.ids)
    chosen, single = check_heads(adapter, heads), pattern_for_each_head(patterns)
    if len(single) != len(chosen):
        raise InputError(f"{len(chosen)} heads need as many patterns, in (layer, head) order; got {len(single)}")
    if lengths := {one.length for one in single} - {sequences.length}:
        raise InputError(
            f"expected sequences of the patterns' length, {sorted(lengths)}; got {sequences.length} tokens"
        )
    sites, layers = adapter.sites(), {}
    with torch.no_grad(), evaluation_mode(model), ExitStack() as stack:
        for layer in sorted({layer for layer, _ in chosen}):
            own = chosen.in_layer(layer)
            layers[layer] = _Layer(sites[layer], own, [single[chosen.index((layer, head))] for head in own])
            found = modules_of(unwrap(model), sites[layer])
            stack.enter_context(watch(sites[layer], found, layers[layer].take))
        for batch in sequences.without_padding():
            adapter.run(batch.to(adapter.device))
    return {(layer, head): columns for layer, of in layers.items() for head, columns in of.solve().items()}


class _Layer:
    """Add up the products that one layer's columns are solved from, batch by batch."""

    def __init__(self, site: Site, heads: Sequence[int], patterns: Sequence[Pattern]):
        self.site, self.heads = site, heads
        output = rows_of(site, "output")
        # Of float64 models in float64; else float32 at least, whatever autocast runs them in.
        self.wide = torch.promote_types(output.parameter.dtype, torch.float32)
        by_slot = output.parameter.detach().movedim(output.dimension, 0).unflatten(0, (-1, site.head_dim))
        self.columns = by_slot[[site.layout.slots.index(head) for head in heads]].double()
        self.live = [site.layout.live.index(head) for head in heads]
        self.frozen = FrozenHeads.from_patterns(patterns, dtype=self.wide, device=output.parameter.device)
        size = len(heads) * site.head_dim
        self.gram, self.missed = self.columns.new_zeros(2, size, size).unbind()

    def take(self, seen: Seen) -> None:
        """Add the positions of one forward pass."""
        layout, wide = self.site.layout, self.wide
        with torch.autocast(seen.query.device.type, enabled=False):
            query = seen.query[:, self.live].to(wide)
            key = seen.key[:, [layout.key_head[slot] for slot in self.live]].to(wide)
            value = values_of(self.site, seen.normed, wide)[:, [layout.kv_head[slot] for slot in self.live]]
            ordinary = live_attention(query, key, value, scale=self.site.scale, soft_cap=self.site.soft_cap)
            fixed = frozen_attention(value, self.frozen)
            ordinary, fixed = (flat_heads(heads).flatten(0, 1) for heads in (ordinary, fixed))
            self.gram += (fixed.T @ fixed).double()
            self.missed += (fixed.T @ (ordinary - fixed)).double()

    def solve(self) -> Mapping[int, Tensor]:
        """Return the new columns of each head, `[D, C]`."""
        ridge = RIDGE * self.gram.diagonal().mean() * torch.eye(len(self.gram)).to(self.gram)
        change = torch.linalg.solve(self.gram + ridge, self.missed @ self.columns.flatten(0, 1))
        new = self.columns + change.view_as(self.columns)
        return dict(zip(self.heads, new.cpu(), strict=True))
