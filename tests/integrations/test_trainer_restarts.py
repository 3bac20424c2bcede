"""A Trainer that starts over, trains again or goes on for longer: no event is carried out twice."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import saf
from saf.errors import InputError, SafWarning
from saf.models.adapter import adapter_for
from tests.integrations.test_trainer import CONFIG, UPDATES, FreezeCallback, Killed, callback, frozen, trainer
from tests.train.helpers import together
from tests.transformers_models import LENGTH, make, tokens

transformers = pytest.importorskip("transformers")


class OutOfMemory(transformers.TrainerCallback):
    """Fail once, after some update, as a device does whose memory is full; call `before` with the model first."""

    def __init__(self, after: int, before=lambda model: None):
        self.after, self.before = after, before

    def on_step_end(self, args, state, control, **given):
        if state.global_step == self.after:
            self.after = 0
            self.before(given["model"])
            raise RuntimeError("CUDA out of memory.")


class Watching(transformers.TrainerCallback):
    """Keep weights and moments of the first layers' queries before the event, after it, and where training restarts."""

    def __init__(self):
        self.kept = {}

    def _keep(self, name, given):
        state = given["optimizer"].state
        self.kept[name] = [
            [weight.detach().clone(), *(state[weight][moment].clone() for moment in ("exp_avg", "exp_avg_sq"))]
            for site in adapter_for(given["model"]).sites()
            for weight, _ in [site.projections()["query"]]
        ]

    def on_train_begin(self, args, state, control, **given):
        if "failing" in self.kept:
            self._keep("again", given)

    def on_step_begin(self, args, state, control, **given):
        if state.global_step == 4 and "failing" not in self.kept:
            self._keep("event", given)

    def on_step_end(self, args, state, control, **given):
        if state.global_step == 6 and "failing" not in self.kept:
            self.frozen = frozen(given["model"])
            self._keep("failing", given)


@pytest.fixture
def accelerate():
    """What finds the size of batches."""
    return pytest.importorskip("accelerate.utils.memory")


def told(made, folder):
    """The callback's events, which the last checkpoint tells of, too."""
    kept = json.loads((folder / f"checkpoint-{UPDATES}" / "trainer_state.json").read_text())["stateful_callbacks"]
    events = [(event.kind, event.update) for event in made.events]
    stored = kept["FreezeCallback"]["attributes"]["progress"]["events"]
    assert [(event["kind"], event["update"]) for event in stored] == events
    return events


def test_a_trainer_that_starts_over_undoes_the_event_exactly_and_begins_anew(hf, accelerate, tmp_path):
    made, watching = callback(), Watching()
    run = trainer(hf, tmp_path, watching, made, OutOfMemory(6), auto_find_batch_size=True)
    run.train()
    assert run._train_batch_size < 4
    assert len(frozen(run.model)) == 4
    assert told(made, tmp_path) == [("freeze", 4)]
    card = (tmp_path / f"checkpoint-{UPDATES}" / "README.md").read_text()
    assert card.count("after update 4") == 1
    size = adapter_for(run.model).sites()[0].head_dim
    kept = zip(*(watching.kept[name] for name in ("event", "failing", "again")), strict=True)
    for layer, (event, failing, again) in enumerate(kept):
        gone = watching.frozen.in_layer(layer)
        live = [head for head in range(4) if head not in gone]
        for then, last, now in zip(event, failing, again, strict=True):
            heads, left = now.unflatten(0, (4, size)), last.unflatten(0, (len(live), size)) if live else last
            assert torch.equal(heads[gone], then.unflatten(0, (4, size))[gone])
            assert torch.equal(heads[live], left[: len(live)])


def work(rank: int, folder: str) -> None:
    """Train in this process of two, which both run out of memory; keep what came of it."""
    made = FreezeCallback(CONFIG, [tokens(seed=1 + rank)], saf.OneTime(0.5))
    run = trainer(transformers, Path(folder), made, OutOfMemory(6), auto_find_batch_size=True)
    run.train()
    assert told(made, Path(folder)) == [("freeze", 4)]
    save_file({name: one.clone() for name, one in run.model.state_dict().items()}, f"{folder}/{rank}.safetensors")


def test_several_processes_start_over_together(accelerate, tmp_path):
    together(2, work, str(tmp_path))
    one, other = (load_file(tmp_path / f"{rank}.safetensors") for rank in range(2))
    assert all(torch.equal(weight, other[name]) for name, weight in one.items())
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / f"checkpoint-{UPDATES}")
    assert len(frozen(opened)) == 4


@pytest.mark.parametrize("stopped", [3, 7])
def test_resumed_training_that_starts_over_has_the_heads_of_its_checkpoint(stopped, hf, accelerate, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        trainer(hf, tmp_path, callback(), Killed(stopped)).train()
    made = callback()
    run = trainer(hf, tmp_path, made, OutOfMemory(7), auto_find_batch_size=True)
    run.train(resume_from_checkpoint=True)
    assert len(frozen(run.model)) == 4
    assert told(made, tmp_path) == [("freeze", 4)]


def test_heads_that_were_frozen_before_stay_so_where_a_trainer_starts_over(hf, accelerate, tmp_path):
    model = make("llama")
    first = saf.freeze_(model, [tokens()], saf.FreezeConfig(count=2, max_fit_kl=99)).heads
    made = callback()
    run = trainer(hf, tmp_path, made, OutOfMemory(6), model=model, auto_find_batch_size=True)
    run.train()
    assert told(made, tmp_path) == [("freeze", 4)]
    assert len(frozen(model)) == 6
    assert len(first - frozen(model)) == 0
    assert [len(event["heads"]) for event in model.config.saf["events"]] == [2, 4]


def test_a_second_call_of_train_is_refused_on_the_frozen_model_and_goes_on_where_it_resumes(hf, tmp_path):
    made = callback()
    run = trainer(hf, tmp_path, made)
    run.train()
    weights = {name: one.clone() for name, one in run.model.state_dict().items()}
    for again in (run, trainer(hf, tmp_path, made, model=run.model)):
        with pytest.raises(InputError, match=r"4 heads.*resume_from_checkpoint=True"):
            again.train()
    assert all(torch.equal(weights[name], one) for name, one in run.model.state_dict().items())
    run.args.max_steps = UPDATES + 2
    run.train(resume_from_checkpoint=True)
    assert run.state.global_step == UPDATES + 2
    assert len(frozen(run.model)) == 4
    assert [event.update for event in made.events] == [4]
    with pytest.raises(InputError, match="resume_from_checkpoint"):
        run.train()
    more = callback(config=saf.FreezeConfig(count=2, max_fit_kl=99))
    trainer(hf, tmp_path / "more", more, model=run.model, max_steps=2, save_strategy="no").train()
    assert len(frozen(run.model)) == 6
    other = trainer(hf, tmp_path / "other", made, max_steps=4)
    other.train()
    assert [event.update for event in made.events] == [2]
    saf.uninstall_(other.model, optimizer=other.optimizer)
    other.train()
    assert len(frozen(other.model)) == 4


def test_training_goes_on_for_longer_after_an_event_whose_moment_was_a_share(hf, tmp_path):
    trainer(hf, tmp_path, callback()).train()
    made = callback()
    run = trainer(hf, tmp_path, made, max_steps=20)
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert [(event.kind, event.update) for event in made.events] == [("freeze", 4)]
    assert len(frozen(run.model)) == 4
    again = trainer(hf, tmp_path, callback(), max_steps=22)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-20"))
    assert len(frozen(again.model)) == 4


def test_other_calibration_sequences_than_a_checkpoint_had_are_told_while_an_event_is_to_come(hf, tmp_path):
    schedule = saf.Gradual(2, 4, groups=2)
    trainer(hf, tmp_path, callback(schedule)).train()

    def others(length=LENGTH):
        return FreezeCallback(CONFIG, [tokens(length=length, seed=9)], schedule)

    for update in (2, 4):  # with all events to come, and with the last one
        checkpoint = str(tmp_path / f"checkpoint-{update}")
        with pytest.warns(SafWarning, match="other calibration or held-out sequences"):
            trainer(hf, tmp_path / "others", others(), save_strategy="no").train(resume_from_checkpoint=checkpoint)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SafWarning)  # after the last event nothing is measured
        run = trainer(hf, tmp_path / "same", others(), save_strategy="no")
        run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))


def test_a_share_stays_the_moment_that_it_was_where_training_goes_on_for_longer(hf, tmp_path):
    trainer(hf, tmp_path, callback()).train()
    run = trainer(hf, tmp_path, made := callback(), max_steps=10)
    with pytest.warns(SafWarning, match="max_steps"):
        run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [event.update for event in made.events] == [4]


def test_the_rest_of_several_events_comes_when_it_was_to_come(hf, tmp_path):
    schedule = saf.Gradual(0.5, 0.75, groups=2)
    trainer(hf, tmp_path, callback(schedule), save_steps=1).train()
    made = callback(schedule)
    run = trainer(hf, tmp_path, made, max_steps=20)
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert [event.update for event in made.events] == [4, 6]
    assert len(frozen(run.model)) == 4
