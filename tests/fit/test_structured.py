"""The free and the structured fit, on planted noise and on the statistics of a real model."""

import numpy as np
import pytest
import torch

from saf.errors import InputError
from saf.fit import CONSTANT_AFTER, fit_kl, fit_variants, fit_with_certificate


def test_the_variants_are_the_fitters_options():
    assert fit_variants(4096) == {"free": {}, "structured": {"alpha_constant_after": CONSTANT_AFTER}}
    assert fit_variants(24, constant_after=None) == {"free": {}}
    assert fit_variants(24, constant_after=0)["structured"] == {"alpha_constant_after": 0}
    for length, after, most in ((64, 16, 15), (100, -1, 24), (4096, 1024, 1023)):
        with pytest.raises(InputError, match=rf"--structured-after.*T = {length}; got {after}: give {most} or less"):
            fit_variants(length, constant_after=after)


def test_both_fits_of_a_trained_model(shared):
    """The 36 heads of lowest variance of a 124M RoPE decoder at 4,096 positions, and the next 36.

    0.047 and 0.080 nats are what an independent fit of these heads gave to the same two digits.
    """
    with np.load(shared / "data" / "patterns" / "rope-124m-4k.npz", allow_pickle=False) as arrays:
        names = ("variance", "eta_abs", "eta_rel", "mean_row_entropy")
        variance, *target = (torch.from_numpy(arrays[name]).flatten(0, 1) for name in names)
    order = variance.argsort()
    for heads, expected in ((order[:36], 0.047), (order[36:72], 0.080)):
        eta_abs, eta_rel, entropy = (part[heads] for part in target)
        kl = {}
        for name, options in fit_variants(4096).items():
            pattern, certificate = fit_with_certificate(eta_abs, eta_rel, **options)
            assert bool(certificate.converged.all())
            kl[name] = fit_kl(pattern, eta_abs, eta_rel, entropy)
        assert kl["free"].mean().item() == pytest.approx(expected, abs=5e-4)
        assert (pattern.alpha[:, CONSTANT_AFTER:] == pattern.alpha[:, -1:]).all()
        # A freer fit is never further from its own target; late key logits are worth less than half as much again.
        assert (kl["free"] <= kl["structured"] + 1e-6).all()
        assert kl["structured"].mean() < 1.5 * kl["free"].mean()
