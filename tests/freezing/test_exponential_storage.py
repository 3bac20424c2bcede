"""Freezing with exponential patterns, through the public surface: what is installed, recorded, saved and undone."""

import json
from dataclasses import replace

import pytest
import torch

import saf
from saf.models import GPT, GPTConfig

LENGTH = 200
SHAPE = GPTConfig(vocab_size=60, num_layers=3, num_heads=4, hidden_size=32, max_length=LENGTH)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make() -> GPT:
    model = GPT(SHAPE)
    model.reset_parameters(torch.Generator().manual_seed(0))
    for block in model.blocks:
        block.attention.q_proj.weight.data *= 20
    return model.to(DEVICE)


def tokens(count: int = 6, seed: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, SHAPE.vocab_size, (count, LENGTH), generator=generator).to(DEVICE)


def test_freezing_is_exact_recorded_saved_and_undone(tmp_path):
    """Beside compact and pruned heads of the same layers."""
    model, ids = make(), tokens()
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
    assert torch.equal(saf.load(tmp_path).to(DEVICE)(ids), frozen)
    saf.uninstall_(model, report.heads)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    compact = [pattern.to_compact() for pattern in patterns.values()]
    saf.install_(model, report.heads, compact, backend="reference")
    torch.testing.assert_close(model(ids), frozen, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("length", "options", "storage"), [(4096, {}, "exponential"), (4096, {"backend": "toeplitz"}, "compact")]
)
def test_long_contexts_are_frozen_in_linear_time_by_default(length, options, storage):
    model = GPT(replace(SHAPE, num_layers=1, max_length=length)).to(DEVICE)
    ids = torch.randint(SHAPE.vocab_size, (2, length), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    report = saf.freeze_(model, [ids], saf.FreezeConfig(max_fit_kl=9, **options))
    assert report.config["storage"] == storage
    assert [pattern.kind for pattern in report.patterns] == [storage]


def test_a_head_that_the_sum_does_not_fit_stays_compact():
    ids, heads = tokens(), ((1, 0), (1, 1))
    config = {"heads": heads, "storage": "exponential"}
    model = make()
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
