"""What an update takes on more GPUs than are here, by arithmetic from stated rates: docs/scale.md has the assumptions.

python examples/many_gpus.py --model 1b --gpus 8 --nodes 16 --batch-size 2 --accumulation 512
python examples/many_gpus.py --model 1b --gpus 4 --batch-size 2 --accumulation 32 --tokens-per-second 32000
"""

from dataclasses import dataclass

import tyro

import saf
from saf.train.step import update_memory

WEIGHT_BYTES, SENT_BYTES = 4, 2
"""Of a weight or a gradient in float32; of a layer's matrices as FSDP2 sends them."""
BACKWARD = 2 / 3
"""Share of a micro-batch's arithmetic that is its backward pass."""


@dataclass(kw_only=True)
class Update:
    """One update, data parallel on several GPUs, all heads live, at the model's longest context."""

    model: str = "1b"
    """Preset of the model's shape."""
    batch_size: int = 2
    """Windows of a micro-batch."""
    accumulation: int = 32
    """Micro-batches of an update, shared out over the GPUs; it grows to the next number that divides evenly."""
    gpus: int = 8
    """GPUs of a machine."""
    nodes: int = 1
    """Machines."""
    tokens_per_second: float = 51_900.0
    """Of one GPU by itself: measure it on the GPU that is meant (1B on an H200: 51,900)."""
    sharded: bool = False
    """FSDP instead of DDP."""
    activation_checkpointing: bool = False
    """Compute layers again in the backward pass."""
    within_gigabytes: float = 450.0
    """GB/s that a GPU sends to others of its machine and receives at the same time; NVLink of an H200."""
    between_gigabytes: float = 50.0
    """GB/s of a GPU to other machines, each way: 400 Gbit/s."""
    reached: float = 0.8
    """Share of these that collectives reach."""
    message_microseconds: float = 5.0
    """Of a step of a ring beside its bytes."""

    def collective(self, size: float) -> float:
        """Return the seconds of one all-gather or reduce-scatter of `size` bytes around a ring of all GPUs."""
        several = self.gpus * self.nodes
        between = self.gpus * self.between_gigabytes  # every GPU's own link at once
        speed = min(self.within_gigabytes, between) if self.nodes > 1 else self.within_gigabytes
        return (several - 1) * (size / several / (1e9 * self.reached * speed) + 1e-6 * self.message_microseconds)

    def run(self) -> None:
        """Print memory of each GPU, seconds of an update, and the share that is waiting for messages."""
        shape, several = saf.preset(self.model), self.gpus * self.nodes
        weights, own = shape.num_parameters, -(-self.accumulation // several)
        tokens = self.batch_size * shape.max_length
        once, again = tokens / self.tokens_per_second, 0.0
        if self.activation_checkpointing:  # the layers' forward pass once more
            output = 6.0 * shape.vocab_size * shape.hidden_size
            again = once * (1 - BACKWARD) * (1 - output / shape.flops_per_token(shape.max_length))
        layer = (4 + 2 * shape.mlp_ratio) * shape.hidden_size**2
        rest = weights - shape.num_layers * layer
        if self.sharded:
            fetched, returned = self.collective(SENT_BYTES * layer), self.collective(WEIGHT_BYTES * layer)
            root = 2 * self.collective(WEIGHT_BYTES * rest)
            each = shape.num_layers * (2 * fetched + returned) + root
            sent, waited = own * each, own * max(each - once - again, root + fetched + returned)
        else:
            sent = 2 * self.collective(WEIGHT_BYTES * weights)
            # Buckets are sent while the last micro-batch goes backward; nothing hides the last one, the embedding's.
            last = 2 * self.collective(WEIGHT_BYTES * shape.vocab_size * shape.hidden_size)
            waited = max(sent - BACKWARD * once - again, min(sent, last))
        shards = several if self.sharded else 1
        memory = update_memory(shape, tokens, recomputes=self.activation_checkpointing, shards=shards)
        seconds = own * (once + again) + waited
        print(f"{self.nodes} x {self.gpus} GPUs, {'fsdp' if self.sharded else 'ddp'}: {own} micro-batches a GPU")
        print(f"update of {own * several * tokens:,} tokens: {seconds:.3f} s, {waited / seconds:.1%} of it waiting")
        print(f"all messages take {sent:.3f} s, hidden or not")
        print(f"a GPU: {memory.state / 1e9:.2f} GB of state, {memory.total / 1e9:.1f} GB in all")


if __name__ == "__main__":
    tyro.cli(Update).run()
