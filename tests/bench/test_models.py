"""What arms consist of: where heads are frozen, flex and free heads."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from saf.bench.models import MEASURED_SHARES, FlexAttention, ModelPlan, causal_blocks, free_backend, heads_per_layer
from saf.bench.protocol import Arm
from saf.ops import BACKENDS

CPU = torch.device("cpu")


@pytest.mark.parametrize(("layers", "heads"), [(12, 12), (36, 8), (1, 3)])
@pytest.mark.parametrize("rate", [0.1, 0.25, 0.5, 1.0])
def test_layers_have_the_shares_that_selection_takes(layers, heads, rate):
    counts = heads_per_layer(num_layers=layers, num_heads=heads, rate=rate)
    assert (sum(counts), max(counts) <= heads) == (round(rate * layers * heads), True)
    if (layers, rate) == (12, 0.25):
        assert counts == [round(12 * share) for share in MEASURED_SHARES]


def test_flex_attention_is_causal_attention():
    query, key, value = torch.randn(3, 2, 4, 200, 16).unbind()
    (output,) = FlexAttention(causal_blocks(200, CPU))(query, key, value, None, None)
    torch.testing.assert_close(output, scaled_dot_product_attention(query, key, value, is_causal=True))


def test_free_heads_pass_values_through_while_something_is_measured():
    value = torch.randn(2, 3, 8, 4)
    with free_backend():
        assert torch.equal(BACKENDS["free"].forward(value, (0, 1, 2), {}), value)
        model = ModelPlan(model="tiny", length=16, device=CPU).build(Arm("auto", "free", 0.5))
        assert model(torch.zeros(1, 16).long()).isfinite().all()
    assert "free" not in BACKENDS
