"""What is timed of a model's passes is checked first: its logits, and that a graph has those of a call."""

import pytest
import torch
from torch import nn

from saf.bench.harness.timing import CALL, GRAPH
from saf.bench.model import passes
from saf.bench.model.passes import Passes
from saf.bench.model.prefill import PrefillSettings
from saf.errors import AccuracyError, InputError
from saf.machine.cuda_graphs import GraphPool


def made(logits: torch.Tensor) -> Passes:
    settings = PrefillSettings(device="cpu", compile="off", warmup=0, repeats=1)
    where = {"ways": (CALL, GRAPH), "device": torch.device("cpu"), "pool": GraphPool()}
    return Passes(settings, nn.Identity(), lambda: lambda: logits, **where)


@pytest.fixture
def replays(monkeypatch):
    """Stands in for graphs: every replay adds to what a call returned."""
    added = []

    class Replay:
        def __init__(self, call, **_):
            self.call, self.outcome = call, None

        def __call__(self):
            self.outcome = self.call() + sum(added)

    monkeypatch.setattr(passes, "GraphReplay", Replay)
    return added


def test_each_way_is_a_program_that_is_timed(replays):
    subject = made(torch.ones(2, 1, 8))
    subject.warm_up()
    assert all(subject.timed_block(way) > 0 for way in (CALL, GRAPH))


def test_a_graph_of_other_logits_is_not_timed(replays):
    replays.append(0.1)
    with pytest.raises(AccuracyError, match=r"a replayed pass is 1.0e-01 from a called one, the bar is 0\.02"):
        made(torch.ones(2, 1, 8)).warm_up()


def test_logits_that_are_not_finite_are_not_timed(replays):
    with pytest.raises(InputError, match="not finite"):
        made(torch.tensor([1.0, torch.nan])).warm_up()
