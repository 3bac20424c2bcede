"""The page about runs or a frozen model (`saf report`), the tables that benchmarks print, and what heads can save."""

from saf.models import GPTConfig
from saf.records.run import RecordedRun

WORTH_TIMING = 0.05
"""A share of an update's operations below which freezing shows in no update time."""


def attention_shares(run: RecordedRun) -> tuple[float, float] | None:
    """Return which share of an update's operations mixes positions, and which share a run's edited heads can save.

    They save their mixing and their rows of the query and key projections. None for a run of unknown sizes.
    """
    length, shape = (run.config.get("train") or {}).get("length"), run.config.get("model") or {}
    if not length or "hidden_size" not in shape:
        return None
    config = GPTConfig.from_dict(shape)
    every = config.flops_per_token(length)
    mixing = 1 - config.flops_per_token(0) / every  # at no context nothing is mixed
    # Two C x C projections a layer, query and key; 6 operations a weight, forward and backward.
    projections = 6.0 * config.num_layers * 2 * config.hidden_size**2 / every
    return mixing, (mixing + projections) * len(run.edited_heads) / run.num_heads


def note_on_speed(run: RecordedRun) -> str | None:
    """Return what bounds the speed of a run, where it is not clear from its times; None for a run of unknown sizes."""
    shares = attention_shares(run)
    if shares is None:
        return None
    mixing, saved = shares
    toy = "A toy on a CPU" if str(run.config.get("device")).startswith("cpu") else "A model of this size"
    no_time, length = f"{toy} gains no time. " if saved <= WORTH_TIMING else "", run.config["train"]["length"]
    # Operations alone: a GPU does those of attention more slowly than those of products of matrices.
    return (
        f"{no_time}Updates are at most {1 / (1 - saved):.2f}× as fast by operations:\nat {length:,} tokens mixing "
        f"positions is {100 * mixing:.0f}% of them, and these heads can save {100 * saved:.1f}% of all."
    )
