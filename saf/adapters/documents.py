"""Documents packed into one row, as `position_ids` that start again tell of them: each attends alone.

Attention takes them as rows of their own, those of similar length together, and gives their outputs back in the places
they came from. Live heads attend in the same rows as frozen ones.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_PAIRS = 2**24
"""Entries of a mask looked at together: 16 MiB of them."""


@dataclass(frozen=True)
class Documents:
    """Hold where the documents of a batch of rows `[B, T]` lie, in groups of similar length."""

    groups: tuple[tuple[Tensor, Tensor], ...]
    """Of each group the tokens' places in the flattened rows, `[N, L]`, and which of them are a document's, not of the
    padding on its right."""
    length: int
    """Tokens of a row."""
    longest: int
    """Tokens of the longest document."""

    @classmethod
    def of(
        cls, mask: Callable[..., Tensor], batch: int, length: int, device: torch.device, *, window: int | None = None
    ) -> "Documents | None":
        """Return the documents that a mask of transformers, `mask(row, head, query, key)`, keeps apart.

        A document begins where a token does not see the one before it. None where no mask of documents is the same:
        one of a window shorter than a document, or any other. With a `window` the mask is that of documents within it,
        and None also stands for rows of one document each. This waits for the device.
        """
        row, place = torch.arange(batch, device=device)[:, None], torch.arange(length, device=device)
        head = place.new_zeros(())
        begins = torch.ones(batch, length, dtype=torch.bool, device=device)
        begins[:, 1:] = ~mask(row, head, place[1:], place[:-1])
        if window is not None and not begins[:, 1:].any():
            return None
        document = begins.cumsum(1)
        for some in place.split(max(1, _PAIRS // (batch * length))):
            query, key = some[None, :, None], place[None, None, :]
            alone = (document[:, some, None] == document[:, None, :]) & (key <= query)
            alone = alone if window is None else alone & (query - key < window)
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
        """Return whether every row is one document."""
        return all(places.shape[1] == self.length and bool(real.all()) for places, real in self.groups)

    def apart(self, attend: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Return the outputs `[B, H, T, D]` of `attend` for `inputs [B, *, T, D]`, every document in a row of its own.

        The padding of a group stands behind its documents, where none of their tokens sees it.
        """
        flat = [each.transpose(1, 2).flatten(0, 1) for each in inputs]
        output = None
        for places, real in self.groups:
            rows = attend(*(each[places].transpose(1, 2) for each in flat)).transpose(1, 2)
            if output is None:
                output = rows.new_empty(flat[0].shape[0], *rows.shape[2:])
            output = output.index_put((places[real],), rows[real])
        assert output is not None, "every row has a document"
        return output.unflatten(0, (-1, self.length)).transpose(1, 2)


def documents_told(begins: Any) -> int:
    """Return how many documents `cu_seq_lens_q` tells flash attention of: where each begins, and where the last ends.

    Those without a token are none: it may be as long as the most documents, its end repeated. It waits for the device.
    """
    return torch.as_tensor(begins).unique().numel() - 1


def _group(first: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor]:
    """Return the places and which are real, `[N, max(sizes)]` both, of documents that begin at `first [N]`."""
    step = torch.arange(max(sizes), device=first.device)
    real = step < torch.tensor(sizes, device=first.device)[:, None]
    return torch.where(real, first[:, None] + step, first[:, None]), real
