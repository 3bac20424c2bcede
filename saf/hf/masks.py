"""Masks of a pass of a model of transformers: padding, packed documents, positions in a cache of fixed size.

transformers asks `padding_mask` for the mask of each kind of layer. Packed documents (`position_ids` that start again)
attend in rows of their own, those of similar length together, so that live and frozen heads compute each as if alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from saf.errors import InputError, UnsupportedError
from saf.hf.cache import NO_WINDOWS
from saf.ops.operator import is_capturing
from saf.ops.positions import CachePosition, assert_later, left_padding

_ENTRIES = 2**24
"""Entries of a mask compared at once: 16 MiB."""
_SLIDING = ("sliding_attention",)
_OWN_ROWS = "pad each document in a row of its own"


class Beginning(NamedTuple):
    """A pass that fills a cache of fixed size from its first place on; `mask [B, Tq]` is of its padding, or None.

    Its queries see each other alone, so attention reads the filled places as it reads whole sequences.
    """

    mask: Tensor | None


@dataclass(frozen=True)
class Documents:
    """Where the documents of a batch of rows `[B, T]` lie, in groups of similar length."""

    groups: tuple[tuple[Tensor, Tensor], ...]
    """Of each group `[N, L]` the tokens' indices in the flattened rows, and which are no padding on the right."""
    length: int
    """Tokens of a row."""
    longest: int
    """Tokens of the longest document."""

    @classmethod
    def of(
        cls,
        mask: Callable[..., Tensor],
        batch: int,
        length: int,
        device: torch.device,
        window: int | None = None,
    ) -> "Documents | None":
        """Return the documents that `mask(row, head, query, key)` separates; None where it is not a mask of documents.

        A document begins where a token does not see the one before it. Waits for the device.
        """
        row, position = torch.arange(batch, device=device)[:, None], torch.arange(length, device=device)
        head = position.new_zeros(())
        begins = torch.ones(batch, length, dtype=torch.bool, device=device)
        begins[:, 1:] = ~mask(row, head, position[1:], position[:-1])
        if window is not None and not begins[:, 1:].any():
            return cls((), length, length)  # transformers' own window; comparing it would cost every layer's pass
        document = begins.cumsum(1)
        for some in position.split(max(1, _ENTRIES // (batch * length))):
            query, key = some[None, :, None], position[None, None, :]
            alone = (document[:, some, None] == document[:, None, :]) & (key <= query)
            if window is not None:
                alone &= query - key < window
            if not torch.equal(mask(row[..., None], head, query, key).expand_as(alone), alone):
                return None
        first = begins.flatten().nonzero().flatten()
        sizes = torch.diff(first, append=first.new_tensor([batch * length])).tolist()
        alike: dict[int, list[int]] = {}
        for number, size in enumerate(sizes):
            alike.setdefault((size - 1).bit_length(), []).append(number)
        groups = [_group(first[numbers], [sizes[number] for number in numbers]) for numbers in alike.values()]
        return cls(tuple(groups), length, max(sizes))

    @property
    def whole(self) -> bool:
        """Whether every row is one document."""
        return all(index.shape[1] == self.length and bool(real.all()) for index, real in self.groups)

    def attend(self, attend: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Return the outputs `[B, H, T, D]` of `attend` for `inputs [B, *, T, D]`, every document in a row of its own.

        The padding of a group stands behind its documents, where none of their tokens sees it.
        """
        flat = [each.transpose(1, 2).flatten(0, 1) for each in inputs]
        output = None
        for index, real in self.groups:
            rows = attend(*(each[index].transpose(1, 2) for each in flat)).transpose(1, 2)
            if output is None:
                output = rows.new_empty(flat[0].shape[0], *rows.shape[2:])
            output = output.index_put((index[real],), rows[real])
        assert output is not None, "every row has a document"
        return output.unflatten(0, (-1, self.length)).transpose(1, 2)


def _group(first: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor]:
    """Return indices and which are real, `[N, max(sizes)]` both, of documents that begin at `first [N]`."""
    step = torch.arange(max(sizes), device=first.device)
    real = step < torch.tensor(sizes, device=first.device)[:, None]
    return torch.where(real, first[:, None] + step, first[:, None]), real


Mask = Tensor | Documents | CachePosition | Beginning | None


def padding_mask(
    *,
    q_length: int,
    kv_length: int | Tensor,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Any,
    attention_mask: Tensor | None = None,
    batch_size: int = 1,
    device: Any = None,
    local_size: int | None = None,
    config: Any = None,
    **_: Any,
) -> Mask:
    """Return which tokens are real, `[B, T]`, None where all are; or documents, or positions in a fixed-size cache.

    Raises UnsupportedError for masks that frozen heads cannot follow, InputError for padding between real tokens.
    """
    from transformers.masking_utils import causal_mask_function

    if local_size is not None and "sliding_attention" not in (getattr(config, "layer_types", None) or _SLIDING):
        return None  # Gemma makes this mask, and no layer takes it
    if isinstance(kv_length, Tensor) or isinstance(kv_offset, Tensor):  # transformers 5.17, of a growing window
        kv_length, q_offset, kv_offset = int(kv_length), int(q_offset), int(kv_offset)
    # The length of a cache of fixed size is a tensor once it is in use.
    fixed = isinstance(q_offset, Tensor) or (
        q_offset == 0 and kv_length > q_length and (attention_mask is None or attention_mask.shape[1] == q_length)
    )
    if fixed and local_size is not None:
        raise UnsupportedError(NO_WINDOWS)
    if not fixed and kv_offset + kv_length != q_offset + q_length:
        raise UnsupportedError(
            "with frozen heads the keys must end where the tokens end: give an attention_mask as long as the input, "
            "and models with a sliding window a cache that grows"
        )
    # While compiling, transformers takes any row for several documents; `attend` checks positions and windows then.
    plain = mask_function is causal_mask_function or torch.compiler.is_compiling()
    if not plain and attention_mask is None and kv_length == q_length:
        documents = Documents.of(mask_function, batch_size, q_length, torch.device(device or "cpu"), local_size)
        if documents is not None and (documents.whole or local_size is None or documents.longest <= local_size):
            return None if documents.whole else documents
        raise UnsupportedError(
            f"frozen heads follow causal masks and packed documents within the sliding window; {_OWN_ROWS}"
        )
    if not (plain or local_size is not None):
        raise UnsupportedError(f"with an attention_mask or a cache frozen heads take causal masks alone; {_OWN_ROWS}")
    if fixed:
        return _in_fixed_cache(q_length, kv_length, q_offset, attention_mask)
    if attention_mask is not None and attention_mask.shape[-1] < kv_offset + kv_length and q_length < kv_length:
        raise InputError(
            f"attention_mask must cover cached tokens too, {kv_offset + kv_length}, got {attention_mask.shape[-1]}"
        )
    # The mask may cover tokens to come.
    return None if attention_mask is None else _padded(attention_mask[:, kv_offset : kv_offset + kv_length])


def _padded(attention_mask: Tensor) -> Tensor | None:
    """Return a mask `[B, T]` where it has padding on the left, else None. It waits for the device, once a pass."""
    return None if left_padding(attention_mask, parts=True) is None else attention_mask


def _in_fixed_cache(
    q_length: int, kv_length: int, q_offset: int | Tensor, attention_mask: Tensor | None
) -> CachePosition | Beginning:
    """Return where the queries of a pass stand in a cache of fixed size with `kv_length` places."""
    if not isinstance(q_offset, Tensor):
        return Beginning(None if attention_mask is None else _padded(attention_mask))
    start = None if attention_mask is None else left_padding(attention_mask, wait=False, parts=True)
    # The cache counts on in the tensor that holds its length.
    return CachePosition.of(q_offset.clone(), q_length, kv_length, start)


def check_positions(position_ids: Tensor, attention_mask: Tensor | None, length: int) -> None:
    """Raise UnsupportedError where positions of real tokens do not count up by one; `length` is with cached tokens.

    Beside a mask or a cache transformers takes such a row for one sequence, whose documents see each other. In compiled
    code the device raises a RuntimeError instead; CUDA graphs and single tokens go unchecked.
    """
    compiling = torch.compiler.is_compiling()
    if position_ids.shape[-1] < 2 or (not compiling and is_capturing(position_ids.device)):
        return
    steps = position_ids.diff(dim=-1)
    counts = steps == 1
    if attention_mask is not None:
        real = F.pad(attention_mask.bool(), (0, length - attention_mask.shape[-1]))  # it may cover tokens to come
        real = real[:, length - 1 - counts.shape[-1] :]
        counts = counts | ~(real[:, 1:] & real[:, :-1])
    elif not compiling:
        # Padding on the right, which no mask shows here, has one position throughout; a document goes on counting.
        counts = counts.cumprod(-1)[:, :-1].bool() | (steps[:, 1:] == 0)
    if compiling:
        assert_later(counts.all(), f"with frozen heads compiled code attends to one sequence a row: {_OWN_ROWS}")
    elif not counts.all():
        raise UnsupportedError(
            "packed documents (position_ids that start again) take no attention_mask and no cache: leave the mask out "
            f"and pass use_cache=False, or {_OWN_ROWS}"
        )


def longest_document(position_ids: Tensor) -> int:
    """Return the tokens of the longest document in positions `[B, T]`. It waits for the device."""
    document = F.pad((position_ids.diff(dim=-1) != 1).cumsum(-1), (1, 0))
    return max(int(row.bincount().max()) for row in document)


def check_boundaries(cu_seq_lens: Tensor | None, rows: int) -> None:
    """Raise UnsupportedError for documents of which only flash attention's `cu_seq_lens_q` shows the boundaries.

    Its end may be repeated, up to some fixed number of documents; code that cannot wait for the device counts those.
    """
    if cu_seq_lens is None or len(cu_seq_lens) <= rows + 1:
        return
    if torch.compiler.is_compiling() or is_capturing(cu_seq_lens.device) or len(cu_seq_lens.unique()) > rows + 1:
        raise UnsupportedError(
            f"frozen heads know packed documents by position_ids, not by cu_seq_lens_q: give both, or {_OWN_ROWS}"
        )
