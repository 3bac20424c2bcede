"""Backends declare what they can do, and do no more and no less."""

import pytest

from saf.ops import BACKENDS
from saf.ops.backend import Backend

CAPABILITIES = {
    "mixes_live": ("mixed",),
    "infers": ("can_infer", "infer"),
    "trains": ("untrainable", "forward_trainable"),
}


@pytest.mark.parametrize("name", sorted(BACKENDS))
def test_a_declared_capability_has_its_methods_and_no_other_has(name):
    backend = type(BACKENDS[name])
    assert backend.__bases__ == (Backend,)
    for capability, methods in CAPABILITIES.items():
        for method in methods:
            assert (method in vars(backend)) == getattr(backend, capability), (name, capability, method)
