"""Updates whose passes are CUDA graphs: those of plain passes, across lengths and a freezing event."""

import copy
from itertools import cycle

import pytest
import torch

import saf
from saf.heads import HeadSet
from saf.machine import Execution
from saf.models.adapter import adapter_for
from saf.surgery import install_
from saf.synthetic import synthetic_patterns
from saf.train.step import Updater, build_optimizer

pytestmark = pytest.mark.gpu
LENGTHS = [64, 40, 56, 64, 40, 64, 56, 40]


def batches(lengths):
    """Hand out micro-batches of these lengths again and again."""
    drawn = torch.Generator().manual_seed(0)
    both = [torch.randint(0, 2048, (2, 32, length), generator=drawn).cuda() for length in lengths]
    return cycle([(one, other.masked_fill(other % 3 == 0, -100)) for one, other in both])


def trained(model, compile: str, lengths: list[int], *, graphed: bool, kernel: str = "auto", accumulation: int = 2):
    """Train a copy, freeze heads of it, and train on; return losses and gradient norms, and shapes of the graphs."""
    own = copy.deepcopy(model)
    updater = Updater(
        model=own,
        optimizer=build_optimizer(own),
        batches=batches(lengths),
        execution=Execution.of("cuda", compile=compile),
        accumulation=accumulation,
        clip=1.0,
        graphed=graphed,
    )
    numbers: list[float] = []
    for part in range(2):
        if part == 1:
            heads = HeadSet([(0, 0), (0, 1), (1, 3), *((2, head) for head in range(4))])
            pattern = synthetic_patterns(len(heads), 64, torch.Generator().manual_seed(0), "cuda")
            install_(own, heads, pattern, optimizer=updater.optimizer)
            updater.compile_()
        for site in adapter_for(own).sites():
            site.pin(kernel)
        numbers += [value for _ in lengths for value in updater.update(1e-3)[:2]]
    return numbers, sorted(updater.micro_batch.graphs) if graphed else []


@pytest.fixture
def model():
    torch.manual_seed(0)
    return saf.GPT(saf.preset("tiny", max_length=64)).cuda()


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("kernel", ["math", "auto"])
def test_updates_are_those_of_plain_passes(model, kernel, accumulation):
    """The math kernel adds up in a fixed order; cuDNN's backward pass does not."""
    options = {"kernel": kernel, "accumulation": accumulation}
    (plain, _), (graphed, shapes) = (trained(model, "off", LENGTHS, graphed=each, **options) for each in (False, True))
    assert shapes == [(32, 40), (32, 56), (32, 64)]
    assert graphed == pytest.approx(plain, rel=2e-3 if kernel == "math" else 2e-2)


@pytest.mark.parametrize("compiled", ["on", "layers"])
def test_compiled_updates_are_those_of_plain_passes(model, compiled):
    (plain, _), (graphed, shapes) = (trained(model, compiled, [64] * 4, graphed=each) for each in (False, True))
    assert shapes == [(32, 64)]
    assert graphed == pytest.approx(plain, rel=2e-2)


def test_padding_changes_no_more_than_rounding(model):
    lengths = [61, 35, 50]
    (plain, _), (graphed, shapes) = (trained(model, "off", lengths, graphed=each) for each in (False, True))
    assert shapes == [(32, 40), (32, 56), (32, 64)]
    assert graphed == pytest.approx(plain, rel=2e-2)
