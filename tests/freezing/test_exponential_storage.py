"""Freezing with exponential patterns, through the public surface: what is installed, recorded, saved and undone."""

import json

import pytest
import torch

import saf
from tests.freezing.small_model import make, tokens

LENGTH = 200


def test_freezing_is_exact_recorded_saved_and_undone(tmp_path):
    """Beside compact and pruned heads of the same layers."""
    model, ids = make(20.0, length=LENGTH), tokens(length=LENGTH)
    saf.prune_(model, [(0, 0)])
    saf.freeze_(model, [ids], saf.FreezeConfig(heads=((0, 1), (2, 1)), max_fit_kl=9))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    report = saf.freeze_(model, [ids], saf.FreezeConfig(count=5, storage="exponential", max_fit_kl=9))

    assert len(report.heads) == 5
    patterns = dict(zip(report.heads, report.patterns, strict=True))
    for (layer, head), fit in report.exponential.items():
        pattern = patterns[layer, head]
        target = (getattr(report.statistics, name)[layer, head] for name in ("eta_abs", "eta_rel", "row_entropy"))
        assert pattern.kind == fit["kind"] == "exponential"
        kl = saf.fit_kl(pattern.to_compact(), *target).item()
        assert report.fit_kl[layer, head] == pytest.approx(kl, abs=1e-6)
        assert fit["extra_kl"] <= 0.02
    json.dumps(report.to_dict(), allow_nan=False)

    frozen = model(ids)
    saf.save(model, tmp_path)
    assert torch.equal(saf.load(tmp_path)(ids), frozen)
    saf.uninstall_(model, report.heads)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    compact = [pattern.to_compact() for pattern in patterns.values()]
    saf.install_(model, report.heads, compact, backend="reference")
    torch.testing.assert_close(model(ids), frozen, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("length", "options", "storage"), [(4096, {}, "exponential"), (4096, {"backend": "toeplitz"}, "compact")]
)
def test_long_contexts_are_frozen_in_linear_time_by_default(length, options, storage):
    model = make(1.0, num_layers=1, num_heads=2, hidden_size=16, length=length)
    report = saf.freeze_(model, [tokens(2, length)], saf.FreezeConfig(count=1, max_fit_kl=9, **options))
    assert report.config["storage"] == storage
    assert [pattern.kind for pattern in report.patterns] == [storage]


def test_a_head_that_the_sum_does_not_fit_stays_compact():
    ids, heads = tokens(length=LENGTH), ((1, 0), (1, 1))
    config = {"heads": heads, "storage": "exponential"}
    model = make(20.0, length=LENGTH)
    free = saf.freeze_(model, [ids], saf.FreezeConfig(**config, max_fit_kl=9))
    saf.uninstall_(model, heads)
    worse = max(heads, key=free.fit_kl.get)
    limit = free.fit_kl[worse] - free.exponential[worse]["extra_kl"] / 2
    report = saf.freeze_(model, [ids], saf.FreezeConfig(**config, max_fit_kl=limit))
    kinds = {head: pattern.kind for head, pattern in zip(report.heads, report.patterns, strict=True)}
    assert kinds[worse] == "compact"
    assert {head: fit["kind"] for head, fit in report.exponential.items()} == kinds
    assert report.fit_kl[worse] <= limit < free.fit_kl[worse]
    assert report.tensors()["rho"].shape == (2, LENGTH)
