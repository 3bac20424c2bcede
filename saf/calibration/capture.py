"""Running a model over the calibration sequences without a trace, and keeping queries and keys of some layers."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor, nn

from saf.adapters import Adapter, Site, rows_of
from saf.adapters.adapter import ON_META
from saf.adapters.description import check_unsharded
from saf.adapters.documents import documents_told
from saf.arguments import Where
from saf.errors import InputError, UnsupportedError
from saf.heads import Head, HeadSet

_OF_TEXT = "of text, saf.integrations.transformers.text_sequences makes them"
Batch = Annotated[Tensor | Mapping[str, Any], Where(f"of token ids [B, T] ({_OF_TEXT})", lambda _: True)]
"""Calibration sequences of one length, or padded ones with their mask; `Where` is said when something else came."""
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)


class Sequences(NamedTuple):
    """Hold calibration sequences, longest first, in batches padded behind, and how many tokens of each count."""

    ids: list[Tensor]
    """LongTensors `[B, T]` on the CPU; those of unequal lengths are as wide as their longest sequence."""
    lengths: tuple[int, ...]

    @property
    def length(self) -> int:
        """Return the tokens of the longest one."""
        return self.lengths[0]

    @property
    def unequal(self) -> tuple[int, ...]:
        """Return the lengths where they differ; none where all are one."""
        return self.lengths if self.lengths[-1] < self.lengths[0] else ()

    @property
    def num_different(self) -> int:
        """Return how many of them are neither equal to another one nor its beginning, which attends as that does."""
        different: list[Tensor] = []
        for row, length in zip((row for batch in self.ids for row in batch), self.lengths, strict=True):
            if not any(torch.equal(row[:length], longer[:length]) for longer in different):
                different.append(row)
        return len(different)

    def without_padding(self) -> list[Tensor]:
        """Return batches that hold nothing but tokens: those of one length as they are, otherwise each by itself."""
        if not self.unequal:
            return self.ids
        rows = (row for batch in self.ids for row in batch)
        return [row[None, :length] for row, length in zip(rows, self.lengths, strict=True)]

    @property
    def hash(self) -> str:
        """Return the SHA-256 of the tokens, and of the lengths where they differ."""
        if not self.unequal:
            return hash_of(torch.cat(self.ids))
        return hash_of(torch.cat([torch.tensor(self.lengths), *(row[0] for row in self.without_padding())]))


def read_sequences(batches: Iterable[Batch]) -> Sequences:
    """Return sequences that may have unequal lengths; those of one length stay in the batches that they come in.

    Raises InputError as `read_rows` does.
    """
    ids, counts = read_rows(batches)
    lengths = [length for each in counts for length in each]
    if len({*lengths, *(tokens.shape[1] for tokens in ids)}) == 1:
        return Sequences(ids, tuple(lengths))
    rows = [row[:length] for row, length in zip((row for tokens in ids for row in tokens), lengths, strict=True)]
    rows.sort(key=len, reverse=True)
    sizes = [len(tokens) for tokens in ids]
    parts = [rows[sum(sizes[:at]) : sum(sizes[: at + 1])] for at in range(len(sizes))]
    # What stands behind a sequence is never looked at; 0 is a token of every vocabulary.
    padded = [nn.utils.rnn.pad_sequence(part, batch_first=True) for part in parts if part]
    return Sequences(padded, tuple(map(len, rows)))


def read_batches(batches: Iterable[Batch]) -> list[Tensor]:
    """Return the token ids of batches on the CPU; raise InputError unless they are integer `[B, T]` of one T >= 1."""
    ids, counts = read_rows(batches)
    if any(length < tokens.shape[1] for tokens, each in zip(ids, counts, strict=True) for length in each):
        raise InputError("batches must not be padded here; give sequences of one full length")
    if len(lengths := {tokens.shape[1] for tokens in ids}) > 1:
        raise InputError(f"sequences in batches must have one length here; got {sorted(lengths)} tokens")
    return ids


def read_rows(batches: Iterable[Batch]) -> tuple[list[Tensor], list[list[int]]]:
    """Return the token ids of batches on the CPU, LongTensors `[B, T]`, and how many tokens of each row count.

    An `attention_mask` beside `input_ids` says which; what does not count stands behind.

    Raises:
        InputError: No sequences, ids that are no integer `[B, T]`, a mask that is not of their shape or has a gap, a
            sequence without a token, or one of several documents, of which `position_ids` or `cu_seq_lens_q` tell.
    """
    if isinstance(batches, Tensor | Mapping):
        raise InputError(f"batches is an iterable of batches, such as a list of one; got a bare {_kind(batches)}")
    ids, counts = [], []
    for batch in map(unwrapped, batches):
        tokens = batch.get("input_ids") if isinstance(batch, Mapping) else batch
        if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.dtype not in _INTEGERS:
            raise InputError(
                "batches must be token ids, integer tensors [B, T] or mappings with such input_ids; got "
                f"{_kind(tokens)}; {_OF_TEXT}"
            )
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        ids.append(tokens.long().cpu())
        counts.append([tokens.shape[1]] * len(tokens) if mask is None else _counted(mask, tokens))
        if isinstance(batch, Mapping):
            _check_one_document(batch, counts[-1])
    if not ids or not sum(map(len, ids)):
        raise InputError("calibration needs batches of at least one sequence; got none")
    if 0 in (length for each in counts for length in each):
        raise InputError("calibration sequences need at least one token; got none")
    return ids, counts


def unwrapped(batch: Any) -> Any:
    """Return a batch, out of the list of one in which the loader of a TensorDataset hands it."""
    return batch[0] if isinstance(batch, list | tuple) and len(batch) == 1 else batch


def _counted(mask: Any, tokens: Tensor) -> list[int]:
    """Return how many tokens of each row a mask keeps; raise InputError unless they are the row's first ones."""
    mask = torch.as_tensor(mask).cpu().bool()
    if mask.shape != tokens.shape:
        raise InputError(f"attention_mask must have the shape of input_ids, {list(tokens.shape)}; got {_kind(mask)}")
    lengths = mask.sum(1)
    if not torch.equal(mask, torch.arange(mask.shape[1]) < lengths[:, None]):
        raise InputError("padding of calibration sequences must stand behind their tokens; pad on the right")
    return lengths.tolist()


def _check_one_document(batch: Mapping[str, Any], lengths: list[int]) -> None:
    """Raise InputError for rows whose positions do not count up from 0, or in which several documents are told of.

    `cu_seq_lens_q` is where each begins and the last one ends, `seq_lengths` lists those of each row.
    """
    positions, begins = (batch.get(name) for name in ("position_ids", "cu_seq_lens_q"))
    several = begins is not None and documents_told(begins) > len(lengths)
    several |= any(len(row) > 1 for row in batch.get("seq_lengths") or ())
    if positions is not None:
        positions = torch.as_tensor(positions).cpu()
        rows = positions.expand(len(lengths), -1) if positions.dim() == 2 and len(positions) == 1 else positions
        numbers = torch.arange(positions.shape[-1])
        several |= len(rows) != len(lengths) or any(
            row.shape != numbers.shape or not torch.equal(row[:length].long(), numbers[:length])
            for row, length in zip(rows, lengths, strict=True)
        )
    if several:
        raise InputError(
            "position_ids, cu_seq_lens_q or seq_lengths tell of several documents in a row, and calibration measures "
            "one sequence a row: give each document a row of its own, padded behind it where they differ in length"
        )


def read_targets(batches: Sequence[Batch], ids: Sequence[Tensor]) -> list[Tensor] | None:
    """Return the `targets` of batches whose ids are `ids`, for losses that are not of every next token; None without.

    Raises InputError unless all batches have them or none, integers of the shape of the ids, and every sequence has one
    that counts: -100 does not.
    """
    given = [batch.get("targets") if isinstance(batch, Mapping) else None for batch in batches]
    targets = [target.long().cpu() for target in given if isinstance(target, Tensor) and target.dtype in _INTEGERS]
    if not targets and all(target is None for target in given):
        return None
    if [target.shape for target in targets] != [tokens.shape for tokens in ids]:
        raise InputError("targets must be integers of the shape of input_ids, in every batch or in none")
    if not all(bool((target != -100).any(1).all()) for target in targets):
        raise InputError("every sequence needs a target that counts; one has none but -100")
    return targets


def check_vocabulary(adapter: Adapter, ids: Sequence[Tensor]) -> None:
    """Raise InputError for a token id that the model has no embedding of, and for a model without numbers.

    On a device such an id would be an assertion. Raises UnsupportedError for weights of which processes have shares.
    """
    for site in adapter.sites():
        check_unsharded("query", rows_of(site, "query").parameter)
    if adapter.device.type == "meta":
        raise InputError(ON_META)
    known = adapter.vocab_size
    low, high = min(int(one.min()) for one in ids), max(int(one.max()) for one in ids)
    if low < 0 or (known is not None and high >= known):
        raise InputError(f"token ids of batches must lie in [0, {known}); got {low if low < 0 else high}")


def _kind(value: Any) -> str:
    """Return dtype and shape of a tensor, or the type of anything else, for messages."""
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Switch every module to evaluation mode and give each its own mode back afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def check_heads(adapter: Adapter, heads: Iterable[Head] | None) -> HeadSet:
    """Return the heads to measure, for None all live ones of layers that can be frozen.

    Raises InputError for a head that is not live, UnsupportedError for one whose layer stays ordinary, or where all do.
    """
    live, sites = adapter.live_heads(), adapter.sites()
    reasons = {layer: reason for layer, site in enumerate(sites) if (reason := site.stays_ordinary) is not None}
    if reasons and len(reasons) == len(sites):
        raise UnsupportedError(f"no head of this model can be frozen: {reasons[0]}")
    ordinary = HeadSet(head for head in live if head[0] in reasons)
    chosen = live - ordinary if heads is None else HeadSet(heads)
    if len(missing := chosen - live):
        raise InputError(f"only live heads can be measured; these are frozen or do not exist: {missing.to_list()}")
    if len(found := chosen & ordinary):
        layer, _ = next(iter(found))
        raise UnsupportedError(f"heads {found.to_list()} cannot be measured: {reasons[layer]}")
    return chosen


class Wanted(NamedTuple):
    """Say what is kept of a layer: which live queries and keys, and the kept key that each kept query reads."""

    queries: list[int]
    keys: list[int]
    kv_head: list[int]

    @classmethod
    def of(cls, site: Site, heads: Sequence[int]) -> "Wanted":
        """Return what measuring `heads` of a layer needs."""
        queries = [site.layout.live.index(head) for head in heads]
        read = [site.layout.key_head[slot] for slot in queries]
        keys = sorted(set(read))
        return cls(queries, keys, [keys.index(key) for key in read])


Captured = tuple[Tensor, Tensor]
"""Rotated queries `[N, heads, T, D]` and keys `[N, K, T, D]` of a layer."""


def capture(adapter: Adapter, wanted: Mapping[int, Wanted], ids: Sequence[Tensor]) -> dict[int, Captured]:
    """Run the model over all sequences, a batch at a time, and return queries and keys of the wanted layers.

    Each is copied into its place as it comes, so that no more is held than what is returned and one forward pass. T is
    the first batch's, the longest; behind shorter ones there are zeros.
    """
    sites = adapter.sites()
    shape = sum(map(len, ids)), ids[0].shape[1]
    kept = {layer: (_Kept(parts.queries, *shape), _Kept(parts.keys, *shape)) for layer, parts in wanted.items()}
    with ExitStack() as stack:
        for layer, both in kept.items():
            stack.enter_context(sites[layer].capture(_sink(*both)))
        for tokens in ids:
            adapter.run(tokens.to(adapter.device))
    return {layer: (query.taken(), key.taken()) for layer, (query, key) in kept.items()}


def _sink(queries: "_Kept", keys: "_Kept") -> Callable[[Tensor, Tensor], None]:
    """Return what takes queries and keys of one pass into their places."""

    def take(query: Tensor, key: Tensor) -> None:
        queries.add(query.detach())
        keys.add(key.detach())

    return take


class _Kept:
    """Keep some heads of all sequences; positions lie outside heads in memory, as models store them."""

    def __init__(self, heads: list[int], count: int, length: int):
        self._heads, self._count, self._length, self._filled = heads, count, length, 0
        self._whole: Tensor | None = None

    def add(self, part: Tensor) -> None:
        """Copy the kept heads of the next sequences behind those kept before; `part` is [sequences, heads, T, D]."""
        if self._whole is None:
            shape = (self._count, self._length, len(self._heads), part.shape[3])
            self._whole = part.new_empty(shape).transpose(1, 2)
        place = self._whole[self._filled : self._filled + len(part)]
        place[:, :, part.shape[2] :] = 0
        place = place[:, :, : part.shape[2]]
        place.copy_(part if len(self._heads) == part.shape[1] else part[:, self._heads])
        self._filled += len(part)

    def taken(self) -> Tensor:
        """Return all that was kept; raise UnsupportedError where the layer did not attend once for every sequence."""
        if self._whole is None or self._filled != self._count:
            raise UnsupportedError(
                "every measured layer must attend once in a pass by the model's attention function, got "
                f"{self._filled} sequences of {self._count}: put back the forward pass and the "
                "configuration that transformers gave the layer"
            )
        return self._whole


def hash_of(ids: Tensor) -> str:
    """Return the SHA-256 of token ids."""
    return hashlib.sha256(ids.long().contiguous().numpy().tobytes()).hexdigest()
