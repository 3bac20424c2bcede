"""Does freezing pay on this device, for this model, at these lengths? Four benchmarks answer by one paired protocol.

    >>> record = saf.bench.measure(saf.bench.Prefill(model="path/to/folder", points=("4096x8",)))  # doctest: +SKIP
    >>> [(row["arm"], row["ratio"]) for row in record["rows"] if not row["refused"]]  # doctest: +SKIP

The point "4096x8" is a context of 4,096 tokens times 8 sequences. `Update`, `Prefill`, `Decode` and `Op` have the
settings of one benchmark each, `Speed` is their base class; `saf.bench.record` describes the record.
"""

from saf.bench.layer import Op
from saf.bench.models import Decode, Prefill, Update
from saf.bench.protocol import Speed, measure

__all__ = ["KINDS", "Benchmark", "Decode", "Op", "Prefill", "Speed", "Update", "measure"]


Benchmark = Update | Prefill | Decode | Op
KINDS: dict[str, type[Speed]] = {cls.kind: cls for cls in (Update, Prefill, Decode, Op)}
