"""Data-parallel wrappers that hold a model as it was before an edit refuse to train it on."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import saf
from saf.errors import InputError, UnsupportedError
from tests.transformers_models import make, tokens

HEADS = [(0, 1), (1, 0), (1, 1), (1, 2), (1, 3)]
PATTERNS = saf.CompactPattern.from_parameters(*torch.zeros(2, 5, 32))


def gpt():
    torch.manual_seed(0)
    return saf.GPT(saf.GPTConfig(vocab_size=61, num_layers=3, num_heads=4, hidden_size=48, max_length=32))


def update(model, optimizer):
    """One update of a model of either kind, wrapped or not."""
    optimizer.zero_grad()
    ids = tokens()
    if isinstance(getattr(model, "module", model), saf.GPT):
        loss = model(ids[:, :-1], ids[:, 1:])
    else:
        loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    optimizer.step()
    return loss


def freeze(model, optimizer):
    saf.install_(model, HEADS, PATTERNS, optimizer=optimizer)


def prune(model, optimizer):
    saf.prune_(model, HEADS, optimizer=optimizer)


def there_and_back(model, optimizer):
    """Every weight has its shape, and its values, again."""
    freeze(model, optimizer)
    saf.uninstall_(model, optimizer=optimizer)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("edit", "family", "unused"), [(prune, "gpt", True), (there_and_back, "gpt", True), (freeze, "llama", False)]
)
def test_a_wrapper_from_before_an_edit_says_so_and_one_made_anew_trains(edit, family, unused, group):
    model = gpt() if family == "gpt" else make(family).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    wrapper = DistributedDataParallel(model, find_unused_parameters=unused)
    retained = update(wrapper, optimizer)  # whose graph lives on
    with pytest.raises(UnsupportedError, match=r"pass its \.module"):
        edit(wrapper, optimizer)
    edit(model, optimizer)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(2):
        with pytest.raises(InputError, match="wrap the model again"):
            update(wrapper, optimizer)
        with torch.no_grad():
            model.eval()
            wrapper(tokens())  # to evaluate it is no matter
            model.train()
    assert all(map(torch.equal, model.parameters(), before))
    newer = DistributedDataParallel(model, find_unused_parameters=True)
    assert all(update(newer, optimizer).isfinite() for _ in range(3))
    assert retained.isfinite()
    assert not any(map(torch.equal, model.parameters(), before)) or edit is not there_and_back
    with pytest.raises(InputError, match="wrap the model again"):
        update(wrapper, optimizer)  # though a newer one exists
