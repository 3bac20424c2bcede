"""Misspelt names get the nearest right one, wherever a name is asked for."""

import pytest
import torch

import saf
from saf.errors import InputError
from saf.ops import choose_backend
from saf.ops.live import check_kernel
from saf.schedules import schedule_from_dict
from saf.scores import required_inputs


@pytest.mark.parametrize(
    ("ask", "right"),
    [
        (lambda: saf.FreezeConfig(score="varianc"), "variance"),
        (lambda: saf.FreezeConfig(match="Random"), "random"),
        (lambda: saf.FreezeConfig(pattern="meen"), "mean"),
        (lambda: saf.FreezeConfig(storage="densed"), "dense"),
        (lambda: saf.FreezeConfig(fitter="proportionnal"), "proportional"),
        (lambda: required_inputs("forward-kl"), "forward_kl"),
        (lambda: saf.fit_compact(torch.ones(3), torch.ones(3), fitter="adams"), "adam"),
        (lambda: choose_backend("toeplits", device=torch.device("cpu"), dtypes=[torch.float32]), "toeplitz"),
        (lambda: check_kernel("cuddn"), "cudnn"),
        (lambda: schedule_from_dict({"name": "onetime"}), "one_time"),
        (lambda: saf.preset("124M"), "124m"),
    ],
)
def test_wrong_names_are_refused_with_the_right_one(ask, right):
    with pytest.raises(InputError, match=rf"; did you mean '{right}'\?"):
        ask()


@pytest.mark.parametrize(
    ("name", "right"),
    [("freeze", "freeze_"), ("calibrat", "calibrate"), ("Freezeconfig", "FreezeConfig"), ("uninstall", "uninstall_")],
)
def test_the_package_names_what_was_meant(name, right):
    """`saf.freeze` is nothing, so that nothing is in the way of `freeze_`."""
    with pytest.raises(AttributeError, match=rf"^module 'saf' has no attribute '{name}'; did you mean '{right}'\?$"):
        getattr(saf, name)
    with pytest.raises(AttributeError, match=r"has no attribute 'xyzzy'$"):
        saf.xyzzy  # noqa: B018
