"""The closed-form refit of output columns against least squares on explicit matrices, in float64."""

import pytest
import torch
from torch.nn.functional import softmax

import saf
from saf.calibration import refit_output
from saf.calibration.refit import RIDGE
from saf.errors import InputError
from saf.heads import HeadSet
from saf.models import GPT, GPTConfig
from saf.patterns import CompactPattern
from saf.surgery import install_, prune_

LENGTH = 20
SHAPE = GPTConfig(vocab_size=40, num_layers=2, num_heads=4, hidden_size=32, max_length=LENGTH)
HEADS = HeadSet([(0, 1), (0, 2), (1, 3)])


def make() -> GPT:
    torch.manual_seed(0)
    model = GPT(SHAPE).double()
    for name, parameter in model.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            parameter.data *= 20  # heads that depend on what they read
    return model


def sequences(count: int = 8) -> torch.Tensor:
    return torch.randint(0, SHAPE.vocab_size, (count, LENGTH), generator=torch.Generator().manual_seed(1))


def patterns() -> CompactPattern:
    generator = torch.Generator().manual_seed(2)
    return CompactPattern.from_parameters(*torch.randn(2, 3, LENGTH, generator=generator, dtype=torch.float64))


def outputs(model: GPT, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and ordinary outputs of every head of a layer, `[N, H, T, D]`."""
    seen = {}
    live = model.blocks[layer].attention.live
    handle = live.register_forward_pre_hook(lambda _, args: seen.update(args=args[:3]))
    with torch.no_grad():
        model(sequences())
    handle.remove()
    query, key, value = seen["args"]
    logits = query @ key.mT / query.shape[-1] ** 0.5
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    return value, softmax(logits.masked_fill(~causal, -torch.inf), -1) @ value


def test_equals_least_squares():
    model = make()
    found = refit_output(model, sequences().split(3), HEADS, patterns())
    for layer in (0, 1):
        own = HEADS.in_layer(layer)
        value, ordinary = outputs(model, layer)
        fixed = patterns()[[HEADS.index((layer, head)) for head in own]].dense() @ value[:, own]
        columns = model.blocks[layer].attention.o_proj.weight.detach().T.unflatten(0, (4, 8))[own].flatten(0, 1)
        rows = fixed.transpose(1, 2).flatten(2).flatten(0, 1)
        target = ordinary[:, own].transpose(1, 2).flatten(2).flatten(0, 1) @ columns
        # The ridge as further rows: sqrt(weight) times the change is to be zero.
        weight = (RIDGE * rows.square().sum(0).mean()).sqrt() * torch.eye(rows.shape[1], dtype=torch.float64)
        expected = torch.linalg.lstsq(torch.cat([rows, weight]), torch.cat([target, weight @ columns])).solution
        got = torch.cat([found[layer, head] for head in own])
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


def test_what_the_layer_writes_comes_nearer():
    model = make()
    ordinary = model.hidden(sequences())
    refitted = refit_output(model, [sequences()], HEADS, patterns())
    misses = []
    for output in (None, refitted):
        frozen = make()
        install_(frozen, HEADS, patterns(), output=output)
        misses.append((frozen.hidden(sequences()) - ordinary).square().mean().item())
    assert misses[1] < 0.9 * misses[0]


def test_heads_of_a_layer_that_has_frozen_and_pruned_ones():
    """Slots are not head ids there: the columns are those of the same heads."""
    model = make()
    install_(model, [(0, 0)], patterns()[:1])
    prune_(model, [(0, 1)])
    before = model.blocks[0].attention.o_proj.weight.detach().T.unflatten(0, (-1, 8)).clone()
    assert model.blocks[0].attention.layout.slots == (2, 3, 0)
    found = refit_output(model, [sequences()], [(0, 3)], patterns()[:1])
    install_(model, [(0, 3)], patterns()[:1], output=found)
    after = model.blocks[0].attention.o_proj.weight.detach().T.unflatten(0, (-1, 8))
    assert model.blocks[0].attention.layout.slots == (2, 0, 3)
    torch.testing.assert_close(after[:2], before[[0, 2]], rtol=0, atol=0)
    torch.testing.assert_close(after[2], found[0, 3])
    assert not torch.equal(after[2], before[1])


@pytest.mark.parametrize(
    ("heads", "pattern", "ids", "message"),
    [
        ([(0, 1)], patterns(), sequences(), "1 heads need as many patterns"),
        ([(0, 1)], patterns()[:1], sequences()[:, :10], "expected sequences of the patterns' length"),
        ([(0, 9)], patterns()[:1], sequences(), "9"),
    ],
)
def test_refused(heads, pattern, ids, message):
    with pytest.raises(InputError, match=message):
        refit_output(make(), [ids], heads, pattern)


@pytest.mark.parametrize("family", ["gpt2", "llama-grouped", "phi3", "gemma2"])
def test_models_of_transformers(family):
    """Heads along either dimension of the weight, grouped, fused, soft-capped: in every one the model comes nearer."""
    models = pytest.importorskip("tests.transformers_models")
    ids, misses = models.tokens(8), []
    ordinary = models.make(family)(ids).logits
    for refit in (False, True):
        model = models.make(family)
        config = saf.FreezeConfig(heads=tuple(models.HEADS), max_fit_kl=9.0, refit=refit)
        saf.freeze_(model, [ids], config)
        misses.append((model(ids).logits - ordinary).square().mean().item())
    assert misses[1] < misses[0]
