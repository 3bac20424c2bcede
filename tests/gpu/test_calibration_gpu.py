"""On a CUDA device: the Triton tile loop against float64 strips, and its choice."""

import functools

import pytest
import torch

from saf.calibration import calibrate, plan_calibration
from saf.calibration.measure import STRIP_ELEMENTS, measure_layer
from saf.models import GPT, preset

measure_by_kernel = pytest.importorskip("saf.calibration.kernels").measure_by_kernel
pytestmark = pytest.mark.gpu
measure_by_strips = functools.partial(measure_layer, strip_elements=STRIP_ELEMENTS["cuda"])
FIELDS = ("variance", "forward_kl", "eta_abs", "eta_rel", "row_entropy")


def operands(count, heads, key_heads, length, dim, dtype, spread=2.0):
    """Queries and keys with a part that all sequences share, stored as models store them."""
    generator = torch.Generator("cuda").manual_seed(0)

    def make(number):
        shared = torch.randn(length, number, dim, device="cuda", generator=generator)
        own = torch.randn(count, length, number, dim, device="cuda", generator=generator)
        return ((own + shared) * (spread / 2) ** 0.5).to(dtype).transpose(1, 2)

    return make(heads), make(key_heads)


def worst(actual, expected) -> dict[str, float]:
    """Largest error of each statistic, relative to its largest entry."""
    pairs = zip(FIELDS, actual, expected, strict=True)
    return {name: ((one - two).abs().max() / two.abs().max()).item() for name, one, two in pairs}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("count", "length", "dim"), [(5, 1000, 64), (3, 512, 96), (2, 130, 128), (3, 257, 256), (4, 65, 20), (2, 1, 64)]
)
@pytest.mark.usefixtures("nan_empty")
def test_agrees_with_float64_from_the_same_queries_and_keys(count, length, dim, dtype):
    query, key = operands(count, 4, 2, length, dim, dtype)
    actual = measure_by_kernel(query, key, kv_head=[0, 0, 1, 1])
    errors = worst(actual, measure_layer(query.double(), key.double(), kv_head=[0, 0, 1, 1]))
    if length == 1:  # one key: nothing varies, but for rounding of the log-sum-exps
        assert actual.variance.max() <= 1e-12
        assert actual.forward_kl.abs().max() <= 1e-6
        errors = {name: errors[name] for name in ("eta_abs", "eta_rel")}
    assert max(errors.values()) <= 1e-5, errors


def test_a_very_low_variance_stays_positive():
    generator = torch.Generator("cuda").manual_seed(0)
    query = 1 + 1e-5 * torch.randn(6, 1, 512, 64, device="cuda", generator=generator)
    key = torch.randn(1, 1, 512, 64, device="cuda", generator=generator).expand(6, -1, -1, -1)
    exact = measure_layer(query.double(), key.double(), kv_head=[0]).variance.item()
    assert 0 < measure_by_kernel(query, key, kv_head=[0]).variance.item() == pytest.approx(exact, rel=0.05)


@pytest.mark.parametrize(("length", "heads", "spread", "limit"), [(16384, 1, 30.0, 2e-5), (65536, 2, 2.0, 1e-5)])
def test_long_sequences_agree_with_float64(length, heads, spread, limit):
    """At 16,384 positions a sharp head's normalisers differ within a block, by up to 8e-6 of the marginals."""
    query, key = operands(2, heads, 1, length, 64, torch.bfloat16, spread=spread)
    exact = measure_layer(query.double(), key.double(), kv_head=[0] * heads)
    errors = worst(measure_by_kernel(query, key, kv_head=[0] * heads), exact)
    assert max(errors.values()) <= limit, errors


def test_memory_stays_near_what_was_planned():
    """The plan counts queries and keys; the sums of tiles and a forward pass take 2 GB more at most."""
    model = GPT(preset("124m", num_layers=3)).cuda()
    batches = torch.randint(0, 50_304, (16, 4096), generator=torch.Generator().manual_seed(0)).split(4)
    with torch.autocast("cuda", torch.bfloat16):
        calibrate(model, batches)  # libraries take their own memory at first use
        plan = plan_calibration(model, batches)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        calibrate(model, batches)
        peak = torch.cuda.max_memory_allocated() - before
    print(f"{peak / 1e9:.2f} GB; {plan}")
    assert plan.capture_bytes <= peak <= plan.capture_bytes + 2e9


def test_auto_takes_the_kernels_and_repeats_to_the_bit():
    query, key = operands(3, 2, 2, 300, 64, torch.bfloat16)
    auto, again, kernel, strips = (
        measure(query, key, kv_head=[0, 1])
        for measure in (measure_layer, measure_layer, measure_by_kernel, measure_by_strips)
    )
    for other in (again, kernel):
        assert all(torch.equal(one, two) for one, two in zip(auto, other, strict=True))
    assert not torch.equal(auto.variance, strips.variance)


def test_strips_serve_what_the_kernels_cannot():
    query, key = operands(3, 2, 2, 300, 64, torch.bfloat16)
    seen = []
    measure_layer(query, key, kv_head=[0, 1], on_strip=lambda strip: seen.append(strip.end))
    assert seen[-1] == 300
    wide = measure_layer(query.double(), key.double(), kv_head=[0, 1])
    assert torch.equal(wide.variance, measure_by_strips(query.double(), key.double(), kv_head=[0, 1]).variance)
