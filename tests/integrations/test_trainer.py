"""FreezeCallback: heads freeze inside a Trainer, whose checkpoints hold everything and go on bit for bit."""

import shutil

import pytest
import torch

import saf
from saf.errors import CheckpointError, InputError, LossError, UnsupportedError
from saf.models.adapter import adapter_for
from tests.integrations.training import CONFIG, UPDATES, Hub, Killed, frozen, opened, same, trainer, transformers
from tests.transformers_models import LENGTH, make, tokens

pytest.importorskip("accelerate")

from saf.integrations.transformers import FreezeCallback, text_sequences

RISING = [tokens(2, seed=11)]
"""Held-out text whose loss rises by freezing."""


def callback(schedule=None, config=CONFIG, **options):
    return FreezeCallback(config, [tokens()], schedule or saf.OneTime(0.5), **options)


def times(callback):
    return [(event.kind, event.update) for event in callback.events]


def test_it_is_the_loop_that_freezes_by_hand(tmp_path):
    row, model = tokens(1, seed=9), make("qwen3")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for update in range(6):
        if update == 3:
            report = saf.freeze_(model, [tokens()], CONFIG, optimizer=optimizer)
        model.train()
        model(row, labels=row, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    one, freezing = make("qwen3"), callback()
    theirs = torch.optim.AdamW(one.parameters(), lr=1e-3)
    constant = torch.optim.lr_scheduler.LambdaLR(theirs, lambda _: 1.0)
    run = trainer(tmp_path, freezing, model=one, rows=row, max_steps=6, max_grad_norm=0.0, save_strategy="no")
    run.optimizer, run.lr_scheduler = theirs, constant
    run.train()
    assert frozen(one) == report.heads
    assert [(event.kind, event.update, event.heads) for event in freezing.events] == [
        ("freeze", 3, report.heads.to_list())
    ]
    for mine, yours in zip(one.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, yours, rtol=1e-4, atol=1e-5)
    for weight, _ in adapter_for(one).sites()[0].projections().values():
        assert theirs.state[weight]["exp_avg"].shape == weight.shape


SCHEDULES = {
    "one_time": (saf.OneTime(0.5), CONFIG, ["freeze"], "llama"),
    "gradual": (
        saf.Gradual(begin=3, end=5, groups=2),
        saf.FreezeConfig(count=4, operation="prune"),
        ["prune"] * 2,
        "gpt2",
    ),
    "undone": (saf.ValidationBudget(budget=0.0, begin=4, every=3), CONFIG, ["freeze", "undo"] * 2, "llama"),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_killed_and_resumed_it_ends_bit_for_bit_the_same(schedule, tmp_path):
    when, config, kinds, family = SCHEDULES[schedule]
    options = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "family": family}

    def new_callback():
        return callback(when, config, heldout=RISING)

    whole = trainer(tmp_path / "whole", first := new_callback(), **options)
    whole.train()
    assert [event.kind for event in first.events] == kinds
    undone = [event.number for event in first.events if event.kind == "freeze"] if "undo" in kinds else []
    assert [event.values["undoes"] for event in first.events if event.kind == "undo"] == undone
    for after in (3, 7) if schedule == "one_time" else (5,):
        folder = tmp_path / str(after)
        if after == 3:  # an earlier training leaves its files about heads in checkpoint-2
            trainer(folder, callback(saf.OneTime(1)), max_steps=2, **options).train()
            assert (folder / "checkpoint-2" / "saf.json").is_file()
        with pytest.raises(KeyboardInterrupt):
            trainer(folder, new_callback(), Killed(after), **options).train()
        again = trainer(folder, resumed := new_callback(), **options)
        again.train(resume_from_checkpoint=True)
        assert same(again.model, whole.model), after
        mine, yours = ([(one.kind, one.update, one.heads) for one in each.events] for each in (resumed, first))
        assert mine == yours
        states = [each.state()["attributes"]["progress"]["schedule"] for each in (resumed, first)]
        assert states[0] == states[1]


EXECUTIONS = {
    "compiled": ({"torch_compile": True, "torch_compile_backend": "eager"}, 1e-4),
    "bf16": ({"bf16": True}, 0.05),
}


@pytest.mark.parametrize("execution", [pytest.param("compiled", marks=pytest.mark.slow), "bf16"])
def test_compiled_or_in_bf16_it_freezes_the_same_heads_and_loses_the_same(execution, tmp_path):
    pytest.importorskip("accelerate.utils.dataclasses")  # these are its work
    options, tolerance = EXECUTIONS[execution]
    schedule, few = saf.Gradual(begin=2, end=4, groups=2), {"max_steps": 6, "save_strategy": "no"}
    plain, run = (trainer(tmp_path, callback(schedule), **few | some) for some in ({}, options))
    for each in (plain, run):
        each.train()
    assert frozen(run.model) == frozen(plain.model)
    losses = [[entry["loss"] for entry in each.state.log_history if "loss" in entry] for each in (plain, run)]
    assert len(losses[0]) == 6
    assert losses[1] == pytest.approx(losses[0], rel=tolerance)
    if run.args.torch_compile:
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
        assert not torch._dynamo.utils.counters["recompile_limit"]


@pytest.mark.parametrize("last", [True, False])
def test_the_best_model_comes_with_its_own_heads(last, tmp_path):
    options = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2, "save_total_limit": 2}
    run = trainer(tmp_path, callback(), greater_is_better=not last, **options)
    run.train()
    best = run.state.best_global_step
    assert (best == 2) is not last
    assert len(frozen(run.model)) == (4 if best > 4 else 0)
    assert same(opened(run.state.best_model_checkpoint), run.model)
    run.evaluate()


def test_it_goes_on_from_ordinary_training_and_a_frozen_model_trains_without_it(tmp_path):
    trainer(tmp_path, max_steps=4).train()
    freezing = callback(saf.OneTime(6))
    run = trainer(tmp_path, freezing, max_steps=UPDATES)
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert times(freezing) == [("freeze", 6)]
    assert not len(frozen(opened(tmp_path, "checkpoint-6")))
    assert same(opened(tmp_path, f"checkpoint-{UPDATES}"), run.model)
    assert "after update 6" in (tmp_path / f"checkpoint-{UPDATES}" / "README.md").read_text()
    on = trainer(tmp_path / "on", model=opened(tmp_path, f"checkpoint-{UPDATES}"), max_steps=4)
    on.train()
    more = trainer(tmp_path / "on", model=opened(tmp_path, "on", "checkpoint-2"), max_steps=4)
    more.train(resume_from_checkpoint=str(tmp_path / "on" / "checkpoint-2"))
    assert same(more.model, on.model)
    assert frozen(more.model) == frozen(run.model)


REFUSED = {
    "rate": (InputError, lambda: callback(config=0.25), {}),
    "heldout": (InputError, lambda: callback(saf.ValidationBudget()), {}),
    "budget": (InputError, lambda: callback(config=saf.FreezeConfig(budget=0.1)), {}),
    "logging": (InputError, lambda: callback(saf.TrainLoss()), {"logging_steps": 2}),
    "gradient": (UnsupportedError, lambda: callback(config=saf.FreezeConfig(score="qk_gradient")), {}),
    "trainable": (UnsupportedError, lambda: callback(config=saf.FreezeConfig(trainable=True)), {}),
    "update": (InputError, lambda: callback(saf.OneTime(20)), {}),
    "copies": (InputError, lambda: FreezeCallback(CONFIG, [tokens()[:1]]), {}),
    "rows": (InputError, lambda: FreezeCallback(CONFIG, [tokens()[:, :7]]), {}),
    "window": (UnsupportedError, lambda: callback(config=saf.FreezeConfig(heads=((3, 1),))), {"family": "gemma3"}),
    "fp16": (UnsupportedError, callback, {"fp16": True}),
    "batch size": (UnsupportedError, callback, {"auto_find_batch_size": True}),
    "two": (InputError, callback, {"more": lambda: [callback()]}),
    "optimiser": (UnsupportedError, callback, {"optim": "adafactor", "save_steps": 1}),
    "dropout": (UnsupportedError, callback, {"model": lambda: make("llama", attention_dropout=0.1)}),
    "labels": (
        UnsupportedError,
        lambda: callback(heldout=[tokens()]),
        {"model": lambda: transformers.LlamaForSequenceClassification(make("llama").config)},
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_before_training(case, tmp_path):
    kind, new_callback, options = REFUSED[case]
    model, more = options.get("model", lambda: None)(), options.get("more", list)()
    options = {name: value for name, value in options.items() if name not in ("model", "more")}
    with pytest.raises(kind):
        trainer(tmp_path / "run", new_callback(), *more, model=model, **options).train()
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").iterdir())


def test_another_setting_and_damaged_files_stop_a_resumption(tmp_path):
    trainer(tmp_path, callback()).train()
    with pytest.raises(InputError, match="the checkpoint's settings"):
        trainer(tmp_path, callback(config=saf.FreezeConfig(count=3))).train(resume_from_checkpoint=True)
    shutil.copy(tmp_path / "checkpoint-6" / "model.safetensors", tmp_path / f"checkpoint-{UPDATES}" / "saf.safetensors")
    with pytest.raises(CheckpointError, match=r"saf\.safetensors is damaged"):
        trainer(tmp_path, callback()).train(resume_from_checkpoint=True)


class Tokenizer:
    """A number for each word."""

    bos_token_id, eos_token_id = 1, 2

    def __call__(self, text, add_special_tokens):
        return {"input_ids": [1] * add_special_tokens + [int(word) for word in text.split()]}


def test_text_becomes_sequences_of_one_length():
    text = [" ".join(map(str, range(3, 18))), " ".join(map(str, range(20, 40)))]
    found = torch.cat(text_sequences(text, Tokenizer(), length=8, count=4, batch_size=3))
    assert found.flatten().tolist() == [*range(3, 18), 2, *range(20, 36)]
    begun = torch.cat(text_sequences(text, Tokenizer(), length=8, count=4, bos=True))
    assert torch.equal(begun, torch.cat([torch.ones(4, 1), found.flatten()[:28].view(4, 7)], 1))
    for texts, length in ((text, 40), (text[0], 8), (text, 0)):
        with pytest.raises(InputError):
            text_sequences(texts, Tokenizer(), length=length, count=4)


def test_what_a_trainer_pushes_has_the_files_about_heads_and_its_card_their_section(tmp_path, monkeypatch):
    hub = Hub(tmp_path / "hub")
    monkeypatch.setattr("transformers.trainer.hf_api", hub)
    options = {"push_to_hub": True, "hub_model_id": "me/frozen", "hub_always_push": True}
    run = trainer(tmp_path / "run", callback(), **options)
    run.train()
    assert hub.frozen == [0, 0, 4, 4]
    run.push_to_hub()  # writes a card of the Trainer's own
    card = (hub.folder / "README.md").read_text()
    assert "generated_from_trainer" in card
    assert card.count("## Frozen attention heads") == 1
    assert same(opened(hub.folder), run.model)


def test_a_second_call_of_train_is_refused_on_the_frozen_model_and_goes_on_where_it_resumes(tmp_path):
    freezing = callback()
    run = trainer(tmp_path, freezing)
    run.train()
    for again in (run, trainer(tmp_path, freezing, model=run.model)):
        with pytest.raises(InputError, match="resume_from_checkpoint=True"):
            again.train()
    run.args.max_steps = UPDATES + 2
    run.train(resume_from_checkpoint=True)
    assert run.state.global_step == UPDATES + 2
    assert times(freezing) == [("freeze", 4)]
    more = callback(config=saf.FreezeConfig(count=2, max_fit_kl=99))
    trainer(tmp_path / "more", more, model=run.model, max_steps=2, save_strategy="no").train()
    assert len(frozen(run.model)) == 6
    trainer(tmp_path / "other", freezing, max_steps=4).train()
    assert times(freezing) == [("freeze", 2)]


def test_the_rest_of_several_events_comes_when_it_was_to_come(tmp_path):
    """Shares are of the training that began, also where it goes on for longer."""
    schedule = saf.Gradual(0.5, 0.75, groups=2)
    trainer(tmp_path, callback(schedule), save_steps=1).train()
    freezing = callback(schedule)
    run = trainer(tmp_path, freezing, max_steps=20, save_strategy="no")
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert times(freezing) == [("freeze", 4), ("freeze", 6)]
    assert len(frozen(run.model)) == 4


ALL = saf.FreezeConfig(rate=1.0, max_fit_kl=99)


def test_an_event_chooses_by_joint_cost_and_is_a_metric(tmp_path):
    text, config = [tokens(4, LENGTH, seed=5)], saf.FreezeConfig(rate=0.25, budget=9.0, max_fit_kl=99)
    event = callback(saf.OneTime(2), config, heldout=text)
    run = trainer(tmp_path, event, max_steps=3, save_strategy="no")
    run.train()
    (metrics,) = [entry for entry in run.state.log_history if "frozen_heads" in entry]
    assert (metrics["step"], metrics["frozen_heads"]) == (2, len(frozen(run.model)))
    for name in ("loss_before", "loss_after"):
        assert metrics[f"heldout_{name}"] == event.events[0].values[name]


def test_after_the_last_update_a_rise_is_refused_and_what_was_trained_is_saved(tmp_path):
    options = {"learning_rate": 1e-9, "save_steps": 2, "max_steps": 2}
    ordinary = trainer(tmp_path / "ordinary", **options)
    ordinary.train()
    event = callback(saf.OneTime(1.0), ALL, heldout=RISING)
    refused = trainer(tmp_path / "refused", event, **options)
    with pytest.raises(LossError, match="accept_loss"):
        refused.train()
    assert event.events == []
    assert same(refused.model, ordinary.model)
    assert same(opened(tmp_path, "refused", "checkpoint-2"), ordinary.model)
    event = callback(saf.OneTime(1.0), ALL, heldout=RISING, accept_loss=True)
    run = trainer(tmp_path / "accepted", event, **options)
    run.train()
    assert len(frozen(run.model)) == 12
    assert event.events[0].values["loss_after"] > event.events[0].values["loss_before"] + 0.05
