"""Optimiser state and edits: state of other heads is refused, and so is state that no row can be given or taken of."""

import copy
from functools import partial

import pytest
import torch

import saf
from saf.errors import InputError, UnsupportedError

LENGTH = 16
SHAPE = saf.GPTConfig(vocab_size=40, num_layers=2, num_heads=4, hidden_size=32, max_length=LENGTH)
HEADS, OTHERS = [(0, 1), (1, 0)], [(0, 2), (1, 3)]
"""Two sets with the same numbers in each layer."""
ADAMW = partial(torch.optim.AdamW, lr=1e-2)
BY_ROWS = {
    "fused": partial(ADAMW, fused=True),
    "momentum": partial(torch.optim.SGD, lr=1e-1, momentum=0.9),
}
"""Optimisers whose state has a weight's own rows."""


def groups(model):
    """One group of matrices and one of vectors, as in most training loops."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    return [{"params": matrices}, {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]


def trained(make=ADAMW, updates=2):
    torch.manual_seed(0)
    model = saf.GPT(SHAPE)
    optimizer = make(groups(model))
    for _ in range(updates):
        update(model, optimizer)
    return model, optimizer


def update(model, optimizer, seed=0):
    ids = torch.randint(0, SHAPE.vocab_size, (2, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    model(ids[:, :-1], ids[:, 1:]).backward()
    optimizer.step()
    optimizer.zero_grad()


def install(model, heads, **options):
    drawn = torch.Generator().manual_seed(len(heads))
    parameters = torch.randn(2, len(heads), LENGTH, generator=drawn, dtype=torch.float64)
    saf.install_(model, heads, saf.CompactPattern.from_parameters(*parameters), **options)


def measured_freeze(model, optimizer):
    ids = torch.randint(0, SHAPE.vocab_size, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    saf.freeze_(model, [ids], saf.FreezeConfig(rate=0.25, max_fit_kl=99), optimizer=optimizer)


EDITS = {
    "install": lambda model, optimizer: install(model, HEADS, optimizer=optimizer),
    "prune": lambda model, optimizer: saf.prune_(model, HEADS, optimizer=optimizer),
    "freeze": measured_freeze,
}


def tensors(model, optimizer):
    """All that a refused call must leave as it was."""
    actual = [tensor.clone() for tensor in model.state_dict().values()]
    return actual + [v.clone() for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v)]


def assert_untouched(before, model, optimizer):
    assert all(map(torch.equal, before, tensors(model, optimizer)))


@pytest.mark.parametrize("name", BY_ROWS)
def test_state_from_before_an_edit_is_refused_after_it(name):
    model, optimizer = trained(BY_ROWS[name])
    saved = copy.deepcopy(optimizer.state_dict())
    install(model, HEADS, optimizer=optimizer)
    before = tensors(model, optimizer)
    with pytest.raises(InputError, match="state"):
        optimizer.load_state_dict(saved)
    assert_untouched(before, model, optimizer)
    update(model, optimizer)
    saf.uninstall_(model, optimizer=optimizer)
    optimizer.load_state_dict(saved)
    update(model, optimizer)


@pytest.mark.parametrize("edit", EDITS)
def test_whichever_edit_it_was_and_also_by_an_optimiser_made_since(edit):
    model, optimizer = trained(BY_ROWS["fused"])
    saved = copy.deepcopy(optimizer.state_dict())
    EDITS[edit](model, optimizer)
    with pytest.raises(InputError, match="state"):
        optimizer.load_state_dict(saved)
    new = BY_ROWS["fused"](groups(model))
    new.load_state_dict(saved)  # not known to have been made for this model before its first step
    with pytest.raises(InputError, match="state"):
        update(model, new)
    new = BY_ROWS["fused"](groups(model))
    new.load_state_dict(optimizer.state_dict())
    update(model, new)


def test_a_training_that_goes_on_from_state_saved_since_is_the_same_bit_for_bit(tmp_path):
    model, optimizer = trained(BY_ROWS["fused"])
    old = copy.deepcopy(optimizer.state_dict())
    install(model, HEADS, optimizer=optimizer)
    update(model, optimizer)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    saf.save(model, tmp_path / "model")
    again = saf.load(tmp_path / "model")
    resumed = BY_ROWS["fused"](groups(again))
    resumed.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    for seed in (1, 2):
        update(model, optimizer, seed)
        update(again, resumed, seed)
    assert all(map(torch.equal, model.state_dict().values(), again.state_dict().values()))
    resumed = BY_ROWS["fused"](groups(again))
    resumed.load_state_dict(old)
    with pytest.raises(InputError, match="state"):
        update(again, resumed)


def test_state_of_as_many_other_heads_is_refused():
    model, optimizer = trained(BY_ROWS["fused"])
    install(model, HEADS, optimizer=optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    saf.uninstall_(model, optimizer=optimizer)
    with pytest.raises(InputError, match="state"):
        optimizer.load_state_dict(saved)
    install(model, OTHERS, optimizer=optimizer)
    before = tensors(model, optimizer)
    with pytest.raises(InputError, match="state"):
        optimizer.load_state_dict(saved)
    assert_untouched(before, model, optimizer)
    saf.uninstall_(model, optimizer=optimizer)
    install(model, HEADS, optimizer=optimizer)
    optimizer.load_state_dict(saved)
    update(model, optimizer)


def test_an_optimiser_of_values_and_outputs_alone_that_was_not_passed_is_refused():
    torch.manual_seed(0)
    model = saf.GPT(SHAPE)
    # Their shapes stay when heads are frozen; their rows change places.
    own = [p for name, p in model.named_parameters() if "v_proj" in name or "o_proj" in name]
    optimizer = torch.optim.AdamW(own, lr=1e-2)
    update(model, optimizer)
    install(model, HEADS)
    with pytest.raises(InputError, match="pass optimizer="):
        update(model, optimizer)
    update(model, torch.optim.AdamW(own, lr=1e-2))


STARTS_AT_ZERO = {
    "adamw": (ADAMW, ["exp_avg", "exp_avg_sq"]),
    "rmsprop": (partial(torch.optim.RMSprop, momentum=0.5), ["square_avg", "momentum_buffer"]),
    "adagrad": (torch.optim.Adagrad, ["sum"]),
}


@pytest.mark.parametrize("name", STARTS_AT_ZERO)
def test_rows_that_left_before_the_first_step_come_back_with_zeros_where_that_is_the_start(name):
    make, names = STARTS_AT_ZERO[name]
    model = saf.GPT(SHAPE)
    install(model, [(0, 1)])
    optimizer = make(groups(model))
    update(model, optimizer)
    saf.uninstall_(model, optimizer=optimizer)
    state = optimizer.state[model.attention_layers()[0].q_proj.weight]
    for each in names:
        assert not state[each][8:16].any()
        assert state[each][:8].any()
    update(model, optimizer)


class ScheduleFree(torch.optim.Optimizer):
    """Keep a second iterate that starts at the weights, as schedule-free optimisers do."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    z = state.setdefault("z", parameter.clone())
                    z.sub_(parameter.grad, alpha=group["lr"])
                    parameter.lerp_(z, 0.5)


STARTS_ELSEWHERE = {
    "schedule-free": ScheduleFree,
    "adagrad from 0.1": partial(torch.optim.Adagrad, initial_accumulator_value=0.1),
}


@pytest.mark.parametrize("name", STARTS_ELSEWHERE)
def test_they_are_refused_where_it_is_not(name):
    model = saf.GPT(SHAPE)
    install(model, [(0, 1)])
    optimizer = STARTS_ELSEWHERE[name](groups(model))
    update(model, optimizer)
    before = tensors(model, optimizer)
    with pytest.raises(UnsupportedError, match="left before its first step"):
        saf.uninstall_(model, optimizer=optimizer)
    assert_untouched(before, model, optimizer)
    install(model, OTHERS, optimizer=optimizer)  # rows that leave with their state come back with it
    saf.uninstall_(model, OTHERS, optimizer=optimizer)
    assert_untouched(before, model, optimizer)


class Listed(torch.optim.SGD):
    """Hold a list for each weight, as optimisers with factors of a matrix do."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["factors"] = [torch.eye(len(parameter))]
        return super().step(closure)


def eight_bit(params):
    return pytest.importorskip("torchao").optim.AdamW8bit(params, block_size=256)


NOT_BY_ROWS = {
    "8 bits": eight_bit,
    "a list": Listed,
    "a state for all weights": lambda params: torch.optim.LBFGS([p for group in params for p in group["params"]]),
}


@pytest.mark.parametrize("name", NOT_BY_ROWS)
def test_state_that_has_no_rows_is_refused_before_anything_moves(name):
    torch.manual_seed(0)
    model = saf.GPT(saf.GPTConfig(vocab_size=40, num_layers=2, num_heads=4, hidden_size=64, max_length=LENGTH))
    optimizer = NOT_BY_ROWS[name](groups(model))
    ids = torch.randint(0, 40, (2, LENGTH))
    model(ids, ids).backward()
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its steps
        optimizer.step(*[lambda: torch.zeros(())] * isinstance(optimizer, torch.optim.LBFGS))
    before = [tensor.clone() for tensor in model.state_dict().values()]
    for edit in EDITS.values():
        with pytest.raises(UnsupportedError, match="carried by heads"):
            edit(model, optimizer)
    assert all(map(torch.equal, before, model.state_dict().values()))


def test_a_copy_of_model_and_optimiser_trains_on_beside_them():
    """As a sharded copy does, whose parameters no edit has seen."""
    model, optimizer = trained()
    install(model, HEADS, optimizer=optimizer)
    twin = copy.deepcopy(model)
    own = dict(zip(model.parameters(), twin.parameters(), strict=True))
    copied = ADAMW([{**group, "params": [own[each] for each in group["params"]]} for group in optimizer.param_groups])
    for parameter, state in optimizer.state.items():
        copied.state[own[parameter]] = copy.deepcopy(state)
    for _ in range(2):
        update(model, optimizer)
        update(twin, copied)
    assert all(map(torch.equal, model.state_dict().values(), twin.state_dict().values()))
