"""What heads are replaced by: every pattern in every storage, executed, saved and loaded again."""

import pytest
import torch

import saf
from saf.records.events import read_events
from saf.targets import TARGETS, dense_pattern
from tests.freezing.small_model import LENGTH, accepting, make, tokens


@pytest.mark.parametrize("pattern", TARGETS)
@pytest.mark.parametrize("storage", ["compact", "dense", "dense_bfloat16"])
def test_every_pattern_is_installed_and_executed(pattern, storage, tmp_path):
    model, ids = make(gain=2.0), tokens()
    config = saf.FreezeConfig(pattern=pattern, storage=storage, seed=7, **accepting(pattern, storage))
    statistics = saf.calibrate(model, [ids], collect=("mean", "row_variance", "logit_mean", "logit_variance"))
    report = saf.freeze_(model, [ids], config)
    expected = dense_pattern(statistics, report.heads, pattern, **({} if "mean" in pattern else {"seed": 7})).weights
    held = report.patterns.dense().double()
    if storage != "compact":
        rounding = 2**-8 if storage == "dense_bfloat16" else 2**-24
        torch.testing.assert_close(held, expected.double(), rtol=rounding, atol=0)
        assert (held.sum(-1) - 1).abs().max() <= LENGTH * rounding / 4
        assert set(report.fit_kl.values()) == {0.0}
    else:
        floored = expected.double().clamp(min=1e-9).tril()
        kl = (torch.xlogy(floored, floored) - torch.xlogy(floored, held)).sum((1, 2)) / LENGTH
        assert list(report.fit_kl.values()) == pytest.approx(kl.tolist(), abs=1e-4)
    report.save(tmp_path)
    layer, head = next(iter(report.heads))
    attention = model.blocks[layer].attention
    value = torch.randn(1, 4, LENGTH, 8, generator=torch.Generator().manual_seed(0))
    found = saf.frozen_attention(value, attention.frozen)[0, 0]
    slot = attention.layout.slots.index(head)
    torch.testing.assert_close(found, held[0].float() @ value[0, slot], rtol=1e-4, atol=1e-4)
    logits = model(ids)
    saf.save(model, tmp_path / "saved")
    assert torch.equal(saf.load(tmp_path / "saved")(ids), logits)


@pytest.mark.parametrize("pattern", ["mean", "structured_random"])
def test_patterns_are_kept_in_canonical_form(pattern, tmp_path):
    model = make()
    config = saf.FreezeConfig(pattern=pattern, seed=7, **accepting(pattern))
    saf.freeze_(model, [tokens()], config).save(tmp_path)
    saf.save(model, tmp_path / "saved")
    frozen = [one for block in saf.load(tmp_path / "saved").blocks if block.attention.frozen is not None
              for one in block.attention.frozen.patterns]  # fmt: skip
    assert len(frozen) == 3
    tensors = read_events(tmp_path)[0].tensors()
    for number, one in enumerate(frozen):
        for name in ("alpha", "rho"):
            expected = getattr(one.canonical(), name)
            torch.testing.assert_close(getattr(one, name).double(), expected.double(), rtol=0, atol=1e-6)
            torch.testing.assert_close(tensors[name][number].double(), expected.double(), rtol=0, atol=1e-6)
        assert one.alpha.max() == one.rho.max() == 0
