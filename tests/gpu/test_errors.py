"""On a CUDA device: the paper's gradient table, for every backend, within its budgets; and longer inputs."""

import pytest

from benchmarks.accuracy import Accuracy, above_limits, measure

pytestmark = pytest.mark.gpu


def test_every_backend_keeps_its_budgets_in_the_papers_case():
    record = measure(Accuracy(device="cuda"))
    # None is the pruned layer.
    assert {row["backend"] for row in record["rows"]} == {"toeplitz", "linear", "fused", "reference", None}
    for row in record["rows"]:
        print({name: row[name] for name in ("backend", "precision", "part", "tensor", "relative_l2", "limit")})
    assert above_limits(record) == []


@pytest.mark.parametrize("head_dim", [64, 128])
def test_longer_inputs_keep_their_budgets(head_dim):
    record = measure(Accuracy(device="cuda", backends=("toeplitz",), length=4096, stored=4096, head_dim=head_dim))
    assert above_limits(record) == []
