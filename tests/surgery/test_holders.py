"""What holds a model as it was before an edit: hooks that know heads by number, wrappers of several processes."""

import copy

import pytest
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import saf
from saf.adapters import adapter_for
from saf.errors import InputError, SafWarning, UnsupportedError
from tests.transformers_models import make, tokens

CONFIG = saf.FreezeConfig(heads=[(0, 1)], max_fit_kl=99)
PATTERN = saf.CompactPattern.from_parameters(*torch.zeros(2, 1, 32))
HEADS = [(0, 1), (1, 0), (1, 1), (1, 2), (1, 3)]
PATTERNS = saf.CompactPattern.from_parameters(*torch.zeros(2, 5, 32))


def gpt():
    torch.manual_seed(0)
    return saf.GPT(saf.GPTConfig(vocab_size=61, num_layers=3, num_heads=4, hidden_size=48, max_length=32))


def attention_of(model):
    return adapter_for(model).sites()[0].attention


HOOKS = [
    ("llama", "o_proj", "forward_pre_hook"),
    ("llama", "v_proj", "forward_hook"),
    ("llama", "q_proj", "full_backward_hook"),
    ("llama", "k_proj", "full_backward_pre_hook"),
    ("qwen3", "q_norm", "forward_hook"),
    ("gpt2", "c_attn", "forward_hook"),
    ("phi3", "qkv_proj", "forward_hook"),
]


@pytest.mark.parametrize(("family", "name", "kind"), HOOKS)
def test_hooks_by_the_number_of_a_head_are_refused_until_they_are_taken_away(family, name, kind):
    model = make(family)
    handle = getattr(getattr(attention_of(model), name), f"register_{kind}")(lambda *_: None)
    _refused_until(model, handle)


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_the_gradient_of_a_weight_are_refused_until_they_are_taken_away(family, kind):
    model = gpt() if family == "gpt" else make(family)
    _refused_until(model, getattr(attention_of(model).v_proj.weight, kind)(lambda *_: None))


def _refused_until(model, handle):
    for refused in (
        lambda: saf.freeze_(model, [tokens()], CONFIG),
        lambda: saf.install_(model, [(0, 1)], PATTERN),
        lambda: saf.prune_(model, [(0, 1)]),
    ):
        with pytest.raises(UnsupportedError, match="hook"):
            refused()
    assert not adapter_for(model).heads("frozen", "pruned")
    handle.remove()
    saf.freeze_(model, [tokens()], CONFIG)


def test_hooks_around_layers_are_no_matter_and_later_ones_on_projections_are_warned_of(recwarn):
    model, reached = make("llama"), []
    model.model.layers[0].register_forward_hook(lambda *_: reached.append("layer"))
    attention_of(model).register_forward_hook(lambda *_: reached.append("attention"))
    saf.install_(model, [(0, 1)], PATTERN)
    model(tokens(), use_cache=False)
    assert reached == ["attention", "layer"]
    assert not [one for one in recwarn if issubclass(one.category, SafWarning)]
    attention_of(model).o_proj.register_forward_pre_hook(lambda *_: None)
    with pytest.warns(SafWarning, match="hooks on o_proj of layer 0"):
        model(tokens(), use_cache=False)


@pytest.fixture
def group(tmp_path):
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


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
    ("edit", "family", "unused"),
    [
        *((edit, family, True) for edit in (freeze, prune, there_and_back) for family in ("gpt", "llama")),
        (freeze, "gpt", False),
        (freeze, "qwen3", False),
        (freeze, "gpt2", True),
    ],
)
def test_a_wrapper_from_before_an_edit_says_so_and_one_made_anew_trains(edit, family, unused, group):
    model = gpt() if family == "gpt" else make(family).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    wrapper = DistributedDataParallel(model, find_unused_parameters=unused)
    kept = update(wrapper, optimizer)  # whose graph lives on
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
    assert kept.isfinite()
    assert not any(map(torch.equal, model.parameters(), before)) or edit is not there_and_back
    with pytest.raises(InputError, match="wrap the model again"):
        update(wrapper, optimizer)  # beside a newer one, too


def test_a_compiled_model_says_so_too(group):
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def wrapped():
        return DistributedDataParallel(torch.compile(model, backend="eager", fullgraph=True))

    def updated(wrapper):
        optimizer.zero_grad()
        loss = wrapper(tokens()[:, :-1], tokens()[:, 1:])
        loss.backward()
        optimizer.step()
        return loss.item()

    wrapper = wrapped()
    updated(wrapper)
    freeze(model, optimizer)
    with pytest.raises(Exception, match="wrap the model again"):  # PyTorch's own kind around ours
        updated(wrapper)
    del wrapper
    alike = copy.deepcopy(model)
    assert updated(wrapped()) == pytest.approx(alike(tokens()[:, :-1], tokens()[:, 1:]).item(), rel=1e-6)


def test_a_model_without_a_wrapper_trains_on_in_a_group(group):
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for edit in (freeze, lambda *both: saf.uninstall_(both[0], optimizer=both[1])):
        edit(model, optimizer)
        assert update(model, optimizer).isfinite()
