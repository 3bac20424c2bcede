"""What an update takes on more GPUs than are here: memory of each, seconds, and the share that is communication.

Arithmetic from stated rates, nothing measured: docs/scale.md says what is assumed, and where it is known to be wrong.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from saf.arguments import Where, above, at_least, check_fields
from saf.experiments.planned_run import ACTIVATION_BYTES, COPY_BYTES, STATE_BYTES, PlannedRun, logit_bytes
from saf.experiments.rates import Rates
from saf.models.config import GPTConfig
from saf.records.table import Table

WEIGHT_BYTES, SENT_BYTES = 4, 2
"""Of a weight or a gradient in float32; of a layer's matrices as FSDP2 sends them."""
BACKWARD = 2 / 3
"""The share of a micro-batch's arithmetic that is its backward pass."""
WHOLE_FITS = 0.5
"""The share of a GPU's memory that a model with its state may fill for every GPU to hold it whole, as in runs."""


@dataclass(frozen=True, kw_only=True)
class Interconnect:
    """State how fast GPUs reach one another, and what each holds."""

    within_gigabytes: Annotated[float, above(0)] = 450.0
    """GB/s that a GPU sends to others of its machine, and receives from them at the same time; NVLink of an H200."""
    between_gigabytes: Annotated[float, above(0)] = 50.0
    """GB/s of a GPU to other machines, each way: 400 Gbit/s."""
    message_microseconds: Annotated[float, at_least(0)] = 5.0
    """What a step of a ring takes beside its bytes."""
    reached: Annotated[float, Where("a share above 0 and at most 1", lambda share: 0 < share <= 1)] = 0.8
    """The share of these GB/s that collectives reach."""
    gpu_gigabytes: Annotated[float, above(0)] = 141.0
    """Memory of a GPU, in GB; an H200's."""

    def __post_init__(self):
        """Raise InputError for numbers that no interconnect has."""
        check_fields(self)

    def collective_seconds(self, size: float, *, gpus: int, nodes: int) -> float:
        """Return what one all-gather or reduce-scatter of `size` bytes in all takes around a ring of all GPUs.

        Each GPU sends as many bytes as all but its own share; an all-reduce is one of each.
        """
        several = gpus * nodes
        if several == 1:
            return 0.0
        # Rings of several machines leave each of them by every GPU's own link at once.
        speed = min(self.within_gigabytes, gpus * self.between_gigabytes) if nodes > 1 else self.within_gigabytes
        share = size / several / (1e9 * self.reached * speed)
        return (several - 1) * (share + 1e-6 * self.message_microseconds)

    def described(self) -> str:
        """Return the assumptions in a sentence."""
        return (
            f"Interconnect (stated, not measured): {self.within_gigabytes:g} GB/s a GPU each way within a machine, "
            f"{self.between_gigabytes:g} between machines, of which {self.reached:.0%} are reached; "
            f"{self.gpu_gigabytes:g} GB a GPU."
        )


@dataclass(frozen=True, kw_only=True)
class Foretold:
    """Hold what one update takes on many GPUs, all heads counted as live."""

    kind: Literal["none", "ddp", "fsdp"]
    micro_batches: int
    """Of each GPU."""
    update_tokens: int
    """Of all GPUs together."""
    state_bytes: float
    """Weights, gradients and moments that a GPU holds."""
    memory_bytes: float
    """The state, the activations of a micro-batch, and under fsdp the layers that are put together."""
    compute_seconds: float
    sent_seconds: float
    """What all messages of an update take."""
    waited_seconds: float
    """What of that no arithmetic hides."""

    @property
    def seconds(self) -> float:
        """Return what an update takes."""
        return self.compute_seconds + self.waited_seconds

    @property
    def waiting(self) -> float:
        """Return the share of an update that is communication which nothing hides."""
        return self.waited_seconds / self.seconds

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**vars(self), "seconds": self.seconds, "waiting": self.waiting}


def foretell(
    shape: GPTConfig,
    *,
    batch_size: int,
    accumulation: int,
    flops: float,
    gpus: int,
    nodes: int,
    links: Interconnect,
    kind: Literal["auto", "ddp", "fsdp"] = "auto",
    activation_checkpointing: bool = False,
) -> Foretold:
    """Foretell one update of a model at its longest context, data parallel on `gpus` GPUs of each of `nodes` machines.

    Args:
        shape: The model's.
        batch_size: Windows of a micro-batch.
        accumulation: Micro-batches of an update, shared out over the GPUs; where they are too few, or do not divide,
            the update grows to the next number that does.
        flops: FLOP/s that one GPU reaches in updates by itself, every head counted as live.
        gpus: Of each machine.
        nodes: Machines.
        links: What connects them.
        kind: How the model is held; auto as runs choose.
        activation_checkpointing: Whether layers are computed again in the backward pass.
    """
    several, weights = gpus * nodes, shape.num_parameters
    if kind == "auto":
        kind = "ddp" if STATE_BYTES * weights <= WHOLE_FITS * 1e9 * links.gpu_gigabytes else "fsdp"
    own = -(-accumulation // several)
    tokens = batch_size * shape.max_length
    once = tokens * shape.flops_per_token(shape.max_length) / flops
    again = 0.0
    if activation_checkpointing:  # the layers' forward pass once more, a third of what all of them take
        output = 6.0 * shape.vocab_size * shape.hidden_size
        again = once * (1 - BACKWARD) * (1 - output / shape.flops_per_token(shape.max_length))
    activations = activation_bytes(shape, tokens, activation_checkpointing=activation_checkpointing)
    passed = {"gpus": gpus, "nodes": nodes}
    if several == 1:
        state, gathered, sent, waited = STATE_BYTES * weights, COPY_BYTES * weights, 0.0, 0.0
    elif kind == "ddp":
        state, gathered = STATE_BYTES * weights, COPY_BYTES * weights
        sent = 2 * links.collective_seconds(WEIGHT_BYTES * weights, **passed)
        # Buckets are sent while the last micro-batch goes backward; the last bucket, the embedding's, has nothing left.
        last = 2 * links.collective_seconds(WEIGHT_BYTES * shape.vocab_size * shape.hidden_size, **passed)
        waited = max(sent - BACKWARD * once - again, min(sent, last))
    else:
        layer = layer_matrices(shape)
        rest = weights - shape.num_layers * layer
        state = STATE_BYTES * weights / several
        # Two layers in 16 bits and one's gradients; embedding and norms whole with their gradients.
        gathered = (2 * SENT_BYTES + WEIGHT_BYTES) * layer + 2 * WEIGHT_BYTES * rest
        fetched = links.collective_seconds(SENT_BYTES * layer, **passed)
        returned = links.collective_seconds(WEIGHT_BYTES * layer, **passed)
        root = 2 * links.collective_seconds(WEIGHT_BYTES * rest, **passed)
        each = shape.num_layers * (2 * fetched + returned) + root
        sent = own * each
        waited = own * max(each - once - again, root + fetched + returned)
    return Foretold(
        kind="none" if several == 1 else kind,
        micro_batches=own,
        update_tokens=own * several * tokens,
        state_bytes=state,
        memory_bytes=state + gathered + activations,
        compute_seconds=own * (once + again),
        sent_seconds=sent,
        waited_seconds=waited,
    )


def layer_matrices(shape: GPTConfig) -> int:
    """Return the entries of a layer's matrices while all its heads are live; norms are not among them.

    >>> layer_matrices(GPTConfig(num_layers=1, num_heads=1, hidden_size=2, max_length=4))
    48
    """
    return (4 + 2 * shape.mlp_ratio) * shape.hidden_size**2


def activation_bytes(shape: GPTConfig, tokens: int, *, activation_checkpointing: bool) -> float:
    """Return the bytes of a micro-batch's activations; recomputed, each layer keeps its float32 input, and one all."""
    one, logits = ACTIVATION_BYTES * tokens * shape.hidden_size, logit_bytes(shape, tokens)
    if not activation_checkpointing:
        return one * shape.num_layers + logits
    return one + WEIGHT_BYTES * tokens * shape.hidden_size * shape.num_layers + logits


def scaling_table(
    runs: Iterable[PlannedRun], rates: Rates, *, gpus: int, nodes: int, links: Interconnect
) -> tuple[Table, dict[str, Foretold]]:
    """Return what the updates of each run take on many GPUs: a table, and by the run's key."""
    rows, told = [], {}
    for run in runs:
        settings = run.settings
        found = told[run.key] = foretell(
            run.shape,
            batch_size=int(settings.get("batch_size", 8)),
            accumulation=int(settings.get("accumulation", 1)),
            flops=rates.flops if settings.get("compile", "auto") != "off" else rates.flops / rates.uncompiled,
            gpus=gpus,
            nodes=nodes,
            links=links,
            activation_checkpointing=bool(settings.get("activation_checkpointing")),
        )
        tokens = run.updates_to_do * run.tokens_per_update
        fits = found.memory_bytes <= 1e9 * links.gpu_gigabytes
        rows.append(
            [
                run.title,
                found.kind,
                found.micro_batches,
                found.update_tokens,
                f"{found.state_bytes / 1e9:.2f} GB",
                f"{found.memory_bytes / 1e9:.1f} GB" + " (more than a GPU has)" * (not fits),
                f"{found.seconds:.3f} s",
                f"{found.waiting:.1%}",
                f"{found.sent_seconds / found.seconds:.1%}",
                f"{found.seconds * tokens / found.update_tokens / 3600:.1f} h",
            ]
        )
    heads = ["run", "held", "micro-batches a GPU", "tokens an update", "state", "memory", "update", "waiting"]
    title = f"{nodes} machine{'s' * (nodes > 1)} of {gpus} GPU{'s' * (gpus > 1)}: an update, per GPU (arithmetic)"
    notes = (
        links.described(),
        "Waiting is the share of an update that is communication which no arithmetic hides; sending is what all "
        "messages take of it, hidden or not. The updates alone make the hours, for as many tokens as the plan has.",
        "Where GPUs cannot share an update's micro-batches evenly, it is counted with more of them: a larger batch "
        "and fewer updates, whose effect on training is not foretold. docs/scale.md has the assumptions.",
    )
    return Table.of(title, [*heads, "sending", "all updates"], rows, notes), told
