"""The settings of `saf.data.prepare`; the command line reads its help from here."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeGuard

from saf.arguments import check
from saf.errors import InputError
from saf.settings import documented

DEFAULT_HELDOUT_FRACTION = 0.05
"""Chosen, not measured: a corpus of ten million tokens still keeps half a million apart, 122 windows of 4,096."""


@documented
@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """Say how text becomes token shards. Raises InputError on a setting out of range."""

    heldout: tuple[str, ...] = ()
    """Sources of held-out text. Without any, a fraction of the documents is held out."""

    heldout_fraction: float | None = None
    """Share of all tokens to hold out, in (0, 0.5]; 0.05 when `heldout` is empty."""

    heldout_shares: tuple[float, float, float] = (1.0, 1.0, 1.0)
    """How held-out tokens are divided over calibration, controller and report."""

    calibration_from: Literal["heldout", "train"] = "heldout"
    """Where calibration windows come from; `train` leaves the calibration partition empty."""

    tokenizer: str = "bpe"
    """`bpe` (trained on the training text), `gpt2` (downloaded), a folder with tokenizer.json or GPT-2's files, or the
    name of a model on the Hugging Face hub, OWNER/NAME, whose tokenizer is downloaded."""

    vocab_size: int = 4096
    """Size of the vocabulary trained by `bpe`, end-of-text token included."""

    tokenizer_bytes: int = 16 * 2**20
    """Most bytes of training text that `bpe` learns from."""

    max_documents: int | None = None
    """Stop reading the sources, and likewise the held-out sources, after this many documents."""

    max_bytes: int | None = None
    """Stop reading the sources, and likewise the held-out sources, once this many bytes of text are read; of a document
    longer than that by itself no more is read or decompressed."""

    text_field: str = "text"
    """The field of JSONL, column of CSV or Parquet, or feature of a dataset that is the text."""

    split_characters: int | None = None
    """Cut longer documents into pieces of at most this many characters, each then a document of its own."""

    seed: int = 0
    """Seed of the order of documents and of what is held out."""

    workers: int | None = None
    """Tokenising processes; the number of usable CPU cores when not given. Never changes the result."""

    shard_tokens: int = 2**27
    """Most tokens in one shard file."""

    def __post_init__(self):
        """Check ranges."""
        check("heldout", self.heldout, tuple[str | Path, ...])
        positive = ("vocab_size", "tokenizer_bytes", "shard_tokens")
        optional = ("max_documents", "max_bytes", "split_characters", "workers")
        for name in (*positive, *optional):
            value = getattr(self, name)
            if (value is not None or name in positive) and (not is_whole(value) or value < 1):
                raise InputError(f"{name} must be a positive integer; got {value!r}")
        if not is_whole(self.seed) or not 0 <= self.seed < 2**63:
            raise InputError(f"seed must be an integer in [0, 2^63); got {self.seed!r}")
        if not isinstance(self.text_field, str) or not self.text_field:
            raise InputError(f"text_field must be the name of a field; got {self.text_field!r}")
        if not isinstance(self.tokenizer, str | Path):
            raise InputError(f"tokenizer must be bpe, gpt2 or a path; got {self.tokenizer!r}")
        if self.calibration_from not in ("heldout", "train"):
            raise InputError(f"calibration_from must be 'heldout' or 'train'; got {self.calibration_from!r}")
        if self.heldout and self.heldout_fraction is not None:
            raise InputError("give held-out sources or heldout_fraction, not both")
        share = self.heldout_fraction
        if share is not None and not (isinstance(share, int | float) and 0 < share <= 0.5):
            raise InputError(f"heldout_fraction must lie in (0, 0.5]; got {share!r}")
        shares = self.heldout_shares
        if not isinstance(shares, Sequence) or len(shares) != 3 or not all(_is_positive(part) for part in shares):
            raise InputError(f"heldout_shares must be three positive numbers; got {shares!r}")

    @property
    def fraction(self) -> float | None:
        """Share of all tokens to hold out, or None when held-out sources are given."""
        if self.heldout:
            return None
        return DEFAULT_HELDOUT_FRACTION if self.heldout_fraction is None else self.heldout_fraction

    @property
    def shares(self) -> tuple[float, float, float]:
        """Return the shares of held-out tokens for calibration, controller and report, summing to one."""
        calibration, controller, report = self.heldout_shares
        if self.calibration_from == "train":
            calibration = 0.0
        total = calibration + controller + report
        return (calibration / total, controller / total, report / total)


def is_whole(value: object) -> TypeGuard[int]:
    """Say whether a value is a whole number; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")
