"""The page about runs or a frozen model (`saf report`), the tables that benchmarks print, and what heads can save."""

from saf.models import GPTConfig
from saf.records.run import RecordedRun


def attention_shares(run: RecordedRun) -> tuple[float, float] | None:
    """Return which share of an update's operations mixes positions, and which share a run's edited heads can save.

    They save their mixing and their rows of the query and key projections. None for a run of unknown sizes.
    """
    length, shape = (run.config.get("train") or {}).get("length"), run.config.get("model") or {}
    if not length or "hidden_size" not in shape:
        return None
    config = GPTConfig.from_dict(shape)
    every = config.flops_per_token(length)
    mixing = 1 - config.flops_per_token(0) / every
    projections = 6.0 * config.num_layers * 2 * config.hidden_size**2 / every
    return mixing, (mixing + projections) * len(run.edited_heads) / run.num_heads
