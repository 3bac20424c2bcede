"""Installing and undoing: exact, with the optimiser carried along, and all or nothing."""

import copy

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from saf.errors import InputError
from saf.heads import HeadSet
from saf.models import GPT
from saf.models.adapter import adapter_for
from saf.surgery import finalize_, install_, prune_, uninstall_
from tests.surgery.trained_model import LENGTH, SHAPE, assert_equal, make, patterns, snapshot, update

SOME = HeadSet([(0, 1), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3)])


def by_hand(model: GPT, tokens: torch.Tensor, heads: HeadSet, fixed: torch.Tensor) -> torch.Tensor:
    """Logits of a model with no frozen heads whose chosen heads' attention is overwritten by `fixed [F, T, T]`."""
    handles = []
    for layer, block in enumerate(model.blocks):

        def replace(module, inputs, output, layer=layer):
            mixed = output[0].clone()
            for head in heads.in_layer(layer):
                length = mixed.shape[-2]
                mixed[:, head] = fixed[heads.index((layer, head)), :length, :length] @ inputs[2][:, head]
            return (mixed,)

        handles.append(block.attention.live.register_forward_hook(replace))
    logits = model(tokens)
    for handle in handles:
        handle.remove()
    return logits


@pytest.mark.parametrize(
    ("optimizer", "options", "edit"),
    [
        (torch.optim.AdamW, {}, {}),
        (torch.optim.SGD, {"momentum": 0.9}, {}),
        (torch.optim.Adam, {"amsgrad": True}, {}),
        (torch.optim.AdamW, {}, {"trainable": True}),
        (torch.optim.AdamW, {}, None),
    ],
    ids=["adamw", "sgd", "amsgrad", "trainable", "prune"],
)
def test_uninstall_is_the_exact_inverse(optimizer, options, edit):
    model, trainer = make(optimizer, **options)
    before, parameters = snapshot(model, trainer), list(model.parameters())
    groups = trainer.state_dict()["param_groups"]
    first = HeadSet([(1, 0), (1, 3)])
    for some in (first, SOME - first):  # rows of the second event have moved in the first
        if edit is None:
            prune_(model, some, optimizer=trainer)
        else:
            install_(model, some, patterns(len(some)), optimizer=trainer, **edit)
    uninstall_(model, HeadSet([(1, 2)]), optimizer=trainer)
    uninstall_(model, optimizer=trainer)
    assert_equal(snapshot(model, trainer), before)
    assert trainer.state_dict()["param_groups"] == groups
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert not any(site.removed for site in adapter_for(model).sites())


def test_retained_rows_train_as_if_their_optimiser_had_always_been_theirs():
    """A model with the heads' patterns fixed by hand, and all rows, takes the same AdamW steps."""
    model, trainer = make()
    twin = copy.deepcopy(model)
    twin_trainer = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    twin_trainer.load_state_dict(copy.deepcopy(trainer.state_dict()))
    install_(model, SOME, patterns(6), optimizer=trainer)
    tokens = torch.randint(0, SHAPE.vocab_size, (2, LENGTH + 1))
    for _ in range(3):
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        trainer.step()
        trainer.zero_grad()
        other = torch.nn.functional.cross_entropy(
            by_hand(twin, tokens[:, :-1], SOME, patterns(6).dense()).flatten(0, 1), tokens[:, 1:].flatten()
        )
        other.backward()
        for layer, head in SOME:
            for name in ("q_proj", "k_proj"):
                assert not getattr(twin.blocks[layer].attention, name).weight.grad[head * 8 : head * 8 + 8].any()
        twin_trainer.step()
        twin_trainer.zero_grad()
        torch.testing.assert_close(loss, other, rtol=1e-12, atol=1e-12)
    uninstall_(model, optimizer=trainer)
    for layer in range(3):
        for name in ("v_proj", "o_proj"):
            one, two = (getattr(m.blocks[layer].attention, name).weight for m in (model, twin))
            torch.testing.assert_close(one, two, rtol=1e-11, atol=1e-12)
        live = [row for head in range(4) if (layer, head) not in SOME for row in range(head * 8, head * 8 + 8)]
        one, two = (m.blocks[layer].attention.q_proj.weight[live] for m in (model, twin))
        torch.testing.assert_close(one, two, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}], ids=str)
def test_an_optimiser_that_was_not_passed_fails_at_its_next_step(options):
    model, trainer = make(**options)
    before = snapshot(model, trainer)
    install_(model, HeadSet([(0, 1)]), patterns(1))
    for _ in range(2):
        with pytest.raises(InputError, match="pass optimizer="):
            update(model, trainer)
    update(model, torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, **options))
    uninstall_(model)
    assert_equal(snapshot(model, trainer), before)
    update(model, trainer)
    install_(model, SOME, patterns(6), optimizer=trainer)
    uninstall_(model)
    with pytest.raises(InputError, match="pass optimizer="):
        update(model, trainer)


def test_an_open_autocast_context_sees_the_edit():
    model, _ = make()
    model, tokens = model.float(), torch.randint(0, SHAPE.vocab_size, (2, LENGTH))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ordinary = model(tokens)
        install_(model, SOME, patterns(6))
        frozen = model(tokens)
        uninstall_(model)
        undone = model(tokens)
    assert torch.equal(undone, ordinary)
    install_(model, SOME, patterns(6))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model(tokens), frozen)


def test_bad_requests_are_refused_and_leave_the_model_as_it_was():
    model, trainer = make()
    before = snapshot(model, trainer)
    stranger = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))])
    requests = [
        (HeadSet([(0, 4)]), patterns(1), {}, r"heads must exist.*got \[\[0, 4\]\]"),
        (HeadSet([(0, 0), (7, 0)]), patterns(2), {}, "heads must exist"),
        (SOME, patterns(5), {}, "6 heads need as many patterns.*got 5"),
        (SOME, patterns(6), {"optimizer": stranger}, "does not hold the model's"),
        (list(SOME)[::-1], patterns(6), {}, "sort both"),
    ]
    for heads, fixed, options, message in requests:
        with pytest.raises(InputError, match=message):
            install_(model, heads, fixed, **options)
    with pytest.raises(InputError, match="must be frozen or pruned"):
        uninstall_(model, HeadSet([(0, 0)]))
    assert_equal(snapshot(model, trainer), before)
    install_(model, HeadSet([(0, 1)]), patterns(1), optimizer=trainer)
    prune_(model, [(0, 2)], optimizer=trainer)
    with pytest.raises(InputError, match="must be live"):
        prune_(model, HeadSet([(0, 1)]), optimizer=trainer)
    with pytest.raises(InputError, match="must be live"):
        install_(model, HeadSet([(0, 2)]), patterns(1), optimizer=trainer)
    finalize_(model)
    with pytest.raises(InputError, match="are gone"):
        uninstall_(model, optimizer=trainer)


class FreezeMachine(RuleBasedStateMachine):
    """Random freezing, pruning, undoing, training and running; the model always computes its frozen heads' patterns."""

    @initialize()
    def start(self):
        self.model, self.trainer = make()
        self.fixed: dict[tuple[int, int], int | None] = {}
        self.steps = 0

    # One rule for all: of several, Hypothesis leaves some out of a whole sequence, and there are few sequences.
    @rule(
        operation=st.sampled_from(["freeze", "freeze", "prune", "undo", "train", "run"]),
        layer=st.integers(0, 2),
        head=st.integers(0, 3),
        seed=st.integers(0, 5),
        length=st.integers(1, LENGTH),
    )
    def operate(self, operation, layer, head, seed, length):
        if operation == "freeze" and (layer, head) not in self.fixed:
            install_(self.model, HeadSet([(layer, head)]), patterns(1, seed), optimizer=self.trainer)
            self.fixed[layer, head] = seed
        elif operation == "undo" and self.fixed:
            chosen = sorted(self.fixed)[(4 * layer + head) % len(self.fixed)]
            uninstall_(self.model, HeadSet([chosen]), optimizer=self.trainer)
            del self.fixed[chosen]
        elif operation == "prune" and (layer, head) not in self.fixed:
            prune_(self.model, HeadSet([(layer, head)]), optimizer=self.trainer)
            self.fixed[layer, head] = None
        elif operation == "train":
            update(self.model, self.trainer, self.steps)
            self.steps += 1
        elif operation == "run":  # inputs up to the patterns' length: prefixes of the same patterns
            generator = torch.Generator().manual_seed(seed)
            self.compare(torch.randint(0, SHAPE.vocab_size, (1 + seed % 3, length), generator=generator))

    @invariant()
    def matches_the_oracle(self):
        if hasattr(self, "model"):
            self.compare(torch.arange(LENGTH)[None] % SHAPE.vocab_size)

    def compare(self, tokens: torch.Tensor) -> None:
        heads = HeadSet(self.fixed)
        thawed = copy.deepcopy(self.model)
        uninstall_(thawed)
        fixed = torch.zeros(len(heads), LENGTH, LENGTH, dtype=torch.float64)
        for number, seed in enumerate(self.fixed[head] for head in heads):
            if seed is not None:
                fixed[number] = patterns(1, seed).dense()[0]
        expected = by_hand(thawed, tokens, heads, fixed)
        torch.testing.assert_close(self.model(tokens), expected, rtol=1e-11, atol=1e-11)


FreezeMachine.TestCase.settings = settings(max_examples=2, stateful_step_count=50, deadline=None)
TestFreezeMachine = FreezeMachine.TestCase
