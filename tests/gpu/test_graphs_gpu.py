"""Updates whose passes are CUDA graphs: those of plain passes, across lengths and a freezing event."""

import copy

import pytest
import torch

import saf
from saf.bench.models import synthetic_patterns
from saf.heads import HeadSet
from saf.machine import Execution
from saf.models.adapter import adapter_for
from saf.surgery import install_
from saf.train.step import Updater, build_optimizer

pytestmark = pytest.mark.gpu
LENGTHS = [64, 40, 56, 64, 40, 64, 56, 40]


class Batches:
    """Hand out micro-batches of these lengths again and again."""

    def __init__(self, lengths):
        drawn = torch.Generator().manual_seed(0)
        both = [torch.randint(0, 2048, (2, 32, length), generator=drawn).cuda() for length in lengths]
        self.all, self.count = [(one, other.masked_fill(other % 3 == 0, -100)) for one, other in both], 0

    def __next__(self):
        self.count += 1
        return self.all[(self.count - 1) % len(self.all)]


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("kernel", ["math", "auto"])
def test_updates_are_those_of_plain_passes(kernel, accumulation):
    """The math kernel adds up in a fixed order; cuDNN's backward pass does not."""
    torch.manual_seed(0)
    model = saf.GPT(saf.preset("tiny", max_length=64)).cuda()
    execution = Execution.of("cuda", compile="off")
    losses: list[list[float]] = []
    shapes: list[tuple[int, int]] = []
    for graphed in (False, True):
        own = copy.deepcopy(model)
        settings = {"execution": execution, "accumulation": accumulation, "clip": 1.0, "graphed": graphed}
        updater = Updater(model=own, optimizer=build_optimizer(own), batches=Batches(LENGTHS), **settings)
        actual = []
        for part in range(2):
            if part == 1:
                heads = HeadSet([(0, 0), (0, 1), (1, 3), *((2, head) for head in range(4))])
                pattern = synthetic_patterns(len(heads), 64, torch.Generator().manual_seed(0), "cuda")
                install_(own, heads, pattern, optimizer=updater.optimizer)
                updater.compile_()
            for site in adapter_for(own).sites():
                site.pin(kernel)
            actual += [value for _ in LENGTHS for value in updater.update(1e-3)[:2]]
        losses.append(actual)
        if graphed:
            shapes = sorted(updater.micro_batch.graphs)
    assert shapes == [(32, 40), (32, 56), (32, 64)]
    assert losses[1] == pytest.approx(losses[0], rel=2e-3 if kernel == "math" else 2e-2)


@pytest.mark.parametrize("compiled", ["on", "layers"])
def test_compiled_updates_are_those_of_plain_passes(compiled):
    """Across a freezing event; the compiler's kernels add up in a fixed order, cuDNN's backward pass does not."""
    torch.manual_seed(0)
    model = saf.GPT(saf.preset("tiny", max_length=64)).cuda()
    losses: list[list[float]] = []
    for graphed in (False, True):
        own = copy.deepcopy(model)
        settings = {"execution": Execution.of("cuda", compile=compiled), "accumulation": 2, "clip": 1.0}
        batches, optimizer = Batches([64] * 4), build_optimizer(own)
        updater = Updater(model=own, optimizer=optimizer, batches=batches, graphed=graphed, **settings)
        losses.append([value for _ in range(4) for value in updater.update(1e-3)[:2]])
        heads = HeadSet([(0, 0), (0, 1), (1, 3), *((2, head) for head in range(4))])
        pattern = synthetic_patterns(len(heads), 64, torch.Generator().manual_seed(0), "cuda")
        install_(own, heads, pattern, optimizer=updater.optimizer)
        updater.compile_()
        losses[-1] += [value for _ in range(4) for value in updater.update(1e-3)[:2]]
        assert not graphed or list(updater.micro_batch.graphs) == [(32, 64)]
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)


def test_padding_changes_no_more_than_rounding():
    model = saf.GPT(saf.preset("tiny", max_length=64)).cuda()
    execution = Execution.of("cuda", compile="off")
    actual = []
    for graphed in (False, True):
        own = copy.deepcopy(model)
        settings = {"execution": execution, "accumulation": 1, "clip": 1.0, "graphed": graphed}
        updater = Updater(model=own, optimizer=build_optimizer(own), batches=Batches([61, 35, 50]), **settings)
        actual.append([value for _ in range(6) for value in updater.update(1e-4)[:2]])
    assert actual[1] == pytest.approx(actual[0], rel=2e-2)
