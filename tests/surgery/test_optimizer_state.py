"""Optimiser state and edits: state of other heads is refused, and so is state without rows for heads."""

import copy
from functools import partial

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

import saf
from saf.errors import InputError, UnsupportedError
from tests.surgery.trained_model import LENGTH, SHAPE, assert_equal, make, patterns, snapshot, update
from tests.train.helpers import run_ranks

HEADS, OTHERS = [(0, 1), (1, 0)], [(0, 2), (1, 3)]
"""Two sets with the same numbers in each layer."""
FUSED = partial(torch.optim.AdamW, lr=1e-2, fused=True)


def install(model, heads, **options):
    saf.install_(model, heads, patterns(len(heads)), **options)


EDITS = {
    "install": lambda model, optimizer: install(model, HEADS, optimizer=optimizer),
    "prune": lambda model, optimizer: saf.prune_(model, HEADS, optimizer=optimizer),
}


@pytest.mark.parametrize("edit", EDITS)
def test_state_from_before_an_edit_is_refused_after_it_also_by_an_optimiser_made_since(edit):
    model, optimizer = make(FUSED)
    saved = copy.deepcopy(optimizer.state_dict())
    EDITS[edit](model, optimizer)
    good = copy.deepcopy(optimizer.state_dict())
    for one in (optimizer, FUSED(model.parameters())):
        one.load_state_dict(saved)
        before = snapshot(model, one)
        with pytest.raises(InputError, match="state"):
            update(model, one)
        with pytest.raises(InputError, match="state"):
            saf.uninstall_(model, optimizer=one)
        assert_equal(snapshot(model, one), before)
    (untouched, other), new = make(FUSED), FUSED(model.parameters())
    other.load_state_dict(good)  # fused AdamW would write beyond these moments
    with pytest.raises(InputError, match="state"):
        update(untouched, other)
    optimizer.load_state_dict(good)
    new.load_state_dict(optimizer.state_dict())
    update(model, new)
    saf.uninstall_(model, optimizer=new)
    new.load_state_dict(saved)
    update(model, new)


def test_a_loop_goes_on_from_saved_model_and_state_bit_for_bit_and_is_undone(tmp_path):
    model = saf.GPT(SHAPE)
    optimizer = FUSED(model.parameters())
    update(model, optimizer)
    install(model, HEADS, optimizer=optimizer)
    update(model, optimizer)
    saf.save(model, tmp_path / "model")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    again = saf.load(tmp_path / "model")
    resumed = FUSED(again.parameters())
    resumed.load_state_dict(torch.load(tmp_path / "optimizer.pt"))
    for one, its in ((model, optimizer), (again, resumed)):
        update(one, its, seed=2)
        saf.uninstall_(one, optimizer=its)
        update(one, its, seed=3)
    assert_equal(snapshot(again, resumed), snapshot(model, optimizer))


def test_state_of_as_many_other_heads_is_refused():
    model, optimizer = make(torch.optim.SGD, momentum=0.9)
    install(model, HEADS, optimizer=optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    saf.uninstall_(model, optimizer=optimizer)
    for others in ([], OTHERS):
        install(model, others, optimizer=optimizer)
        good = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(saved)
        with pytest.raises(InputError, match="state"):
            update(model, optimizer)
        optimizer.load_state_dict(good)
    saf.uninstall_(model, optimizer=optimizer)
    install(model, HEADS, optimizer=optimizer)
    optimizer.load_state_dict(saved)
    update(model, optimizer)


def test_an_optimiser_of_values_and_outputs_alone_that_was_not_passed_is_refused():
    model, _ = make()
    # Their shapes stay when heads are frozen; their rows change places.
    own = [p for name, p in model.named_parameters() if "v_proj" in name or "o_proj" in name]
    optimizer = torch.optim.AdamW(own, lr=1e-2)
    update(model, optimizer)
    install(model, HEADS)
    with pytest.raises(InputError, match="pass optimizer="):
        update(model, optimizer)
    update(model, torch.optim.AdamW(own, lr=1e-2))


@pytest.mark.parametrize(("kind", "known"), [({}, True), ({"initial_accumulator_value": 0.1}, False)])
def test_rows_that_left_before_the_first_step_come_back_with_zeros_only_where_that_is_the_start(kind, known):
    model = saf.GPT(SHAPE).double()
    install(model, [(0, 1)])
    optimizer = torch.optim.Adagrad(model.parameters(), **kind)
    update(model, optimizer)
    if known:
        saf.uninstall_(model, optimizer=optimizer)
        sums = optimizer.state[model.attention_layers()[0].q_proj.weight]["sum"]
        assert (bool(sums[:8].any()), bool(sums[8:16].any())) == (True, False)
        update(model, optimizer)
        return
    install(model, OTHERS, optimizer=optimizer)
    before = snapshot(model, optimizer)
    with pytest.raises(UnsupportedError, match="left before its first step"):
        saf.uninstall_(model, optimizer=optimizer)
    assert_equal(snapshot(model, optimizer), before)
    saf.uninstall_(model, OTHERS, optimizer=optimizer)  # rows that left with their state come back with it


class Listed(torch.optim.SGD):
    """Hold a list for each weight, as optimisers with factors of a matrix do."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["factors"] = [torch.eye(len(parameter))]
        return super().step(closure)


@pytest.mark.parametrize("kind", ["eight bits", "lists"])
def test_state_that_has_no_rows_is_refused_before_anything_moves(kind):
    torch.manual_seed(0)
    model = saf.GPT(saf.GPTConfig(vocab_size=40, num_layers=2, num_heads=4, hidden_size=64, max_length=LENGTH))
    adam = None if kind == "lists" else pytest.importorskip("torchao").optim.AdamW8bit
    optimizer = adam(model.parameters(), block_size=256) if adam else Listed(model.parameters())
    ids = torch.randint(0, 40, (2, LENGTH))
    model(ids, ids).backward()
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its steps
        optimizer.step()
    before = [tensor.clone() for tensor in model.state_dict().values()]
    for edit in EDITS.values():
        with pytest.raises(UnsupportedError, match="must be a plain tensor"):
            edit(model, optimizer)
    assert all(map(torch.equal, before, model.state_dict().values()))


FULL = StateDictOptions(full_state_dict=True)


def gathered(model, optimizer):
    return copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=FULL))


def restored(model, state):
    optimizer = FUSED(model.parameters())
    set_optimizer_state_dict(model, optimizer, copy.deepcopy(state), options=FULL)
    return optimizer


def through_shares(rank):
    """Train shares of a frozen model, then of the same model with all heads live again."""
    model, optimizer = make(FUSED)
    install(model, OTHERS, optimizer=optimizer)
    wrong = gathered(model, optimizer)
    saf.uninstall_(model, optimizer=optimizer)
    install(model, HEADS, optimizer=optimizer)
    shares = fully_shard(copy.deepcopy(model))
    with pytest.raises(InputError, match="state"):
        update(model, restored(model, gathered(shares, restored(shares, wrong))))
    model.zero_grad()
    for _ in ("frozen", "live again"):
        shares = fully_shard(copy.deepcopy(model))
        own = restored(shares, gathered(model, optimizer))
        for seed in range(2):
            update(model, optimizer, seed)
            update(shares, own, seed)
        torch.testing.assert_close(get_model_state_dict(shares, options=FULL), model.state_dict())
        back = restored(model, gathered(shares, own))
        torch.testing.assert_close(back.state_dict(), optimizer.state_dict())
        update(model, back)
        saf.uninstall_(model, optimizer=back)
        optimizer = back


def test_state_keeps_its_heads_through_shares_of_weights():
    run_ranks(2, through_shares)
