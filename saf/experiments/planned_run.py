"""One run of a plan: what it is told, what it needs, and what it takes of time and memory.

A run's key is the hash of what decides its outcome: its settings, its data, and its parent's key and checkpoint. Equal
arms of two recipes are one run, and a run that is in the store is not made again.
"""

import hashlib
import json
import math
from dataclasses import dataclass
from typing import Any

from saf.experiments.examples import Examples, Work
from saf.experiments.rates import Rates
from saf.experiments.recipe import Flags
from saf.freezing.config import FreezeConfig
from saf.models import preset
from saf.models.config import GPTConfig
from saf.ops.decoder.loss import chunk_rows
from saf.schedules import Gradual, OneTime, TrainLoss, ValidationBudget, schedule_from_dict
from saf.train.config import TrainConfig

SCHEMA = "saf.experiment/1"
"""Of keys and of the store; another version's runs are not this one's."""
_FREE = ("log_every", "quiet", "tensorboard", "keep", "save_at", "token_losses", "match_speed_source")
"""Settings that decide what is told, shown and kept, not what is computed."""

STATE_BYTES = 16
"""Bytes a parameter: float32 weight, gradient, and AdamW's two moments."""
COPY_BYTES = 2
"""Bytes a parameter: the copy in 16 bits that autocast keeps through a micro-batch."""
SAVED_BYTES = 12
"""Bytes a parameter in a checkpoint: float32 weight and AdamW's two moments; patterns stored whole are float32, too."""
ACTIVATION_BYTES, LOGIT_BYTES = 24, 8
"""Bytes a token, layer and channel, and bytes a logit of those held at once: what peaks on an H200 leave beside all
that, of 1B at 1 and 2 x 8,192 tokens and of 124M at 8 x 4,096 (results/bench), within 4%."""


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """Describe one run of `saf pretrain`, or of `saf finetune`."""

    key: str
    flags: Flags
    """What it is told, beside its data, folder and parent."""
    settings: Flags
    """The same with what it takes over from its parents."""
    parent: str | None
    """The key of the run that it goes on from."""
    step: int | None
    """The parent's update that it goes on from; None is its last."""
    match: str | None
    """The key of the run whose time it gets."""
    heads: str | None = None
    """The key of the run whose heads it has."""
    like: str | None = None
    """The key of the finetuned run whose examples, epochs and settings it takes over."""
    work: Work | None = None
    """What it is expected to do where it finetunes its parent; None pretrains."""
    files: Examples | None = None
    """The examples that it is finetuned on, where they are known."""
    scale: str
    seed: int
    vocabulary: int
    """Tokens of its tokenizer, where its settings name no other."""
    tables: tuple[tuple[str, str], ...]
    """The recipes that it stands in, each with the name of its arm there."""

    @property
    def title(self) -> str:
        """Return the run in words: where it stands first, and its seed."""
        recipe, arm = self.tables[0]
        more = f" and {len(self.tables) - 1} more" if len(self.tables) > 1 else ""
        return f"{recipe}/{arm}{more}, seed {self.seed}"

    @property
    def needs(self) -> frozenset[str]:
        """Return the keys of the runs that must have ended before it begins."""
        return frozenset(key for key in (self.parent, self.match, self.heads, self.like) if key)

    @property
    def verb(self) -> str:
        """Return the command that makes it."""
        return "pretrain" if self.work is None else "finetune"

    @property
    def task(self) -> str | None:
        """Return what it finetunes its parent on; None for pretraining."""
        return None if self.work is None else str(self.settings["task"])

    @property
    def shape(self) -> GPTConfig:
        """Return the model's shape."""
        given = {"vocab_size": self.vocabulary, "max_length": self.settings["length"]}
        return preset(self.settings["model"], **{**given, **self.settings.get("model_overrides", {})})

    @property
    def updates(self) -> int:
        """Return the updates of the whole schedule; to finetune, all that are expected."""
        return int(self.settings["updates"]) if self.work is None else self.work.updates

    @property
    def accumulation(self) -> int:
        """Return the micro-batches of an update."""
        return int(self.settings.get("accumulation", TrainConfig.accumulation))

    @property
    def micro_batch_tokens(self) -> int:
        """Return the tokens of a micro-batch; to finetune, of its largest."""
        longest = int(self.settings["length"])
        if self.work is not None:
            longest = min(longest, int(self.settings.get("max_tokens") or self.work.length))
        return int(self.settings.get("batch_size", TrainConfig.batch_size)) * longest

    @property
    def tokens_per_update(self) -> float:
        """Return the tokens of an update; to finetune, as many as are expected."""
        return self.micro_batch_tokens * self.accumulation if self.work is None else self.work.tokens

    @property
    def updates_to_do(self) -> int:
        """Return how many updates are its own."""
        return self.updates - (self.step or 0)

    @property
    def flops_per_update(self) -> float:
        """Return the FLOPs of one update, as if all heads were live."""
        length = self.shape.max_length if self.work is None else round(self.work.length)
        return self.tokens_per_update * self.shape.flops_per_token(length)

    @property
    def own_clock(self) -> bool:
        """Return whether the seconds that it takes decide how long it trains."""
        return self.match is not None and self.settings.get("match_speed") is None

    def seconds(self, rates: Rates, *, done: int | None = None) -> float:
        """Return what it takes on one GPU, all heads counted as live; `done` is the update that it goes on from."""
        left = self.updates_to_do if done is None else max(0, self.updates - done)
        # A forward pass is a third of an update's arithmetic.
        tested = 0.0 if self.work is None else self.work.tested * self.shape.flops_per_token(self.shape.max_length) / 3
        return rates.seconds(
            left * self.flops_per_update + tested,
            micro_batches=left * self.accumulation,
            events=events_of(self.settings),
            compile=self.settings.get("compile", "auto"),
        )

    @property
    def predicted_bytes(self) -> float:
        """Return its peak memory, as if all heads were live."""
        return peak_bytes(self.shape, self.micro_batch_tokens)

    @property
    def checkpoint_bytes(self) -> float:
        """Return the bytes of one of its checkpoints, as if all heads were live beside those stored whole."""
        whole = 0.0
        if self.settings.get("freeze.storage") == "dense":
            heads = math.ceil(float(self.settings.get("freeze.rate", 0)) * self.shape.num_layers * self.shape.num_heads)
            whole = 4.0 * heads * self.shape.max_length**2
        return SAVED_BYTES * self.shape.num_parameters + whole

    @property
    def disk_bytes(self) -> float:
        """Return the bytes that its checkpoints take at most while it runs: one a moment that it still passes."""
        passed = (OneTime(at=float(share)).first_update(self.updates) for share in self.settings.get("save_at", ()))
        own = {update for update in passed if update > (self.step or 0)} | {self.updates}
        return self.checkpoint_bytes * (len(own) if self.work is None else max(len(own), TrainConfig.keep + 1))

    @property
    def kept_bytes(self) -> float:
        """Return the bytes of the checkpoints that stay once it has a record."""
        return self.disk_bytes if self.parent is None else self.checkpoint_bytes


def peak_bytes(shape: GPTConfig, tokens: int) -> float:
    """Return the peak memory of updates of an ordinary model with `tokens` in a micro-batch, on one GPU by itself."""
    layers = ACTIVATION_BYTES * tokens * shape.num_layers * shape.hidden_size
    return (STATE_BYTES + COPY_BYTES) * shape.num_parameters + layers + logit_bytes(shape, tokens)


def logit_bytes(shape: GPTConfig, tokens: int) -> float:
    """Return the bytes of the logits held at once, and of what their gradient takes beside them."""
    return LOGIT_BYTES * float(shape.vocab_size * min(tokens, chunk_rows(shape.vocab_size)))


def events_of(settings: Flags) -> int:
    """Return how many events a run may have at most, by the settings of its schedule; 0 where no heads change."""
    if not any(name.startswith("freeze.") for name in settings):
        return 0
    name = settings.get("schedule", OneTime.name)
    fields = {key.rpartition(".")[2]: value for key, value in settings.items() if key.startswith(f"schedule.{name}.")}
    schedule = schedule_from_dict({"name": name, **fields})
    updates = int(settings["updates"])
    if isinstance(schedule, Gradual):
        return schedule.groups
    if isinstance(schedule, ValidationBudget):
        share = schedule.every if isinstance(schedule.every, float) else schedule.every / updates
        return round((1 - schedule.first_update(updates) / updates) / share)
    if isinstance(schedule, TrainLoss):
        return round(min(schedule.cap, float(settings.get("freeze.rate", schedule.cap))) / schedule.group)
    return 1


def run_key(
    flags: Flags,
    *,
    data: str,
    parent: str | None,
    step: int | None,
    match: str | None = None,
    heads: str | None = None,
    like: str | None = None,
) -> str:
    """Return the hash, 16 digits, of what decides a run's outcome."""
    deciding = {name: value for name, value in flags.items() if name not in _FREE and not _is_default(name, value)}
    others = [match] if heads is None and like is None else [match, heads] if like is None else [match, heads, like]
    text = json.dumps([SCHEMA, deciding, data, parent, step, *others], sort_keys=True, default=list)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


_USUAL = FreezeConfig()


def _is_default(name: str, value: Any) -> bool:
    """Return whether a setting of freezing is what it would be anyway, so that writing it down makes no other run."""
    group, _, field_name = name.partition(".")
    return group == "freeze" and field_name != "rate" and getattr(_USUAL, field_name, None) == value
