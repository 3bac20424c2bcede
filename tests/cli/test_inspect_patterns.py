"""inspect tells which heads are executed as stored T x T matrices, and why."""

import pytest
import torch

import saf as saf_package
from saf.calibration import readable
from saf.heads import HeadSet
from saf.models import GPT, GPTConfig
from saf.ops.frozen_heads import FrozenHeads
from saf.patterns import CompactPattern, DensePattern, TrainablePattern
from saf.sidecar import save
from saf.surgery import install_
from tests.ops.exponential_patterns import exponential_patterns

LENGTH = 64
SHAPE = {"vocab_size": 40, "num_layers": 2, "num_heads": 5, "hidden_size": 40, "max_length": LENGTH}


def near_identity(depth: float) -> CompactPattern:
    """Return a pattern whose first row has weights of size 1 and every other row of size exp(-depth) before scaling."""
    alpha, rho = torch.full((LENGTH,), -depth), torch.full((LENGTH,), -2 * depth)
    alpha[0] = rho[0] = 0
    return CompactPattern.from_parameters(alpha, rho)


SOFT = CompactPattern.from_parameters(torch.zeros(LENGTH), -0.1 * torch.arange(LENGTH))
# float16's smallest number is exp(-16.6), that of the wider two about exp(-90).
BEYOND_HALF, BEYOND_SINGLE = near_identity(25.0), near_identity(200.0)


@pytest.fixture
def saved(tmp_path):
    """A saved model: soft, two beyond float16 of which one beyond float32, one trainable; in layer 1 a dense one."""
    model = GPT(GPTConfig(**SHAPE))
    fixed = [SOFT, BEYOND_HALF, BEYOND_SINGLE]
    install_(model, HeadSet([(0, 0), (0, 1), (0, 2)]), fixed, backend="toeplitz")
    install_(model, HeadSet([(0, 3)]), TrainablePattern(SOFT.alpha, SOFT.rho), trainable=True)
    install_(model, HeadSet([(1, 2)]), [DensePattern(SOFT.dense())], backend="toeplitz")
    save(model, tmp_path)
    return tmp_path


def test_exponential_patterns_are_counted_apart(saf_json, tmp_path):
    model = GPT(GPTConfig(**SHAPE))
    fast = exponential_patterns(1, LENGTH, band=16, sinks=8)[0]
    install_(model, HeadSet([(0, 0), (0, 1)]), [fast, SOFT])
    save(model, tmp_path)
    found = saf_json("inspect", tmp_path)
    assert found["patterns"][0]["kinds"] == {"exponential": 1, "compact": 1}
    kept = [tensor.nbytes for one in (fast, SOFT) for tensor in one.state().values()]
    assert found["storage"]["parameters"] == sum(kept)


def test_json_counts_stored_heads_by_reason(saf_json, saved):
    first, second = saf_json("inspect", saved)["patterns"]
    assert first["stored"] == {"dense": 0, "float32": 1, "bfloat16": 1, "float16": 2}
    assert second["stored"] == {"dense": 1, "float32": 0, "bfloat16": 0, "float16": 0}
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    frozen = FrozenHeads.from_patterns([SOFT, BEYOND_HALF, BEYOND_SINGLE], backend="toeplitz", dtype=dtypes)
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        assert frozen.tables(dtype)["weights"].shape == (first["stored"][name], LENGTH, LENGTH)


def test_tables_say_how_many_and_why(saf, saved):
    code, out, _ = saf("inspect", saved)
    assert code == 0
    words = " ".join(out.split())
    assert (
        "heads that backend toeplitz stores as T x T: 1 whose pattern is dense, 1 that float32 cannot hold as tables, "
        "1 that bfloat16 cannot hold as tables, 2 that float16 cannot hold as tables"
    ) in words
    assert "stored" in out
    allocated = saf_package.storage_report(saf_package.load(saved)).allocated
    assert f"allocated to execute them (CPU, float32 and bfloat16): {readable(allocated)}" in words
