"""A Trainer that starts over, trains again or goes on for longer: no event is carried out twice."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import saf
from saf.adapters import adapter_for
from saf.errors import InputError, SafWarning
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


def test_events_that_cannot_be_undone_stop_a_trainer_that_starts_over(hf, accelerate, tmp_path):
    run = trainer(hf, tmp_path, callback(), OutOfMemory(6, saf.finalize_), auto_find_batch_size=True)
    with pytest.raises(InputError, match=r"starts over.*4 heads.*were not kept.*smaller per_device_train_batch_size"):
        run.train()
    assert len(frozen(run.model)) == 4


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
        with pytest.raises(InputError, match=r"4 heads.*resume_from_checkpoint=True.*new callback"):
            again.train()
    assert all(torch.equal(weights[name], one) for name, one in run.model.state_dict().items())
    run.args.max_steps = UPDATES + 2
    run.train(resume_from_checkpoint=True)
    assert run.state.global_step == UPDATES + 2
    assert len(frozen(run.model)) == 4
    assert [event.update for event in made.events] == [4]
    with pytest.raises(InputError, match="begin anew at update 0"):
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


def test_training_that_was_interrupted_after_an_event_does_not_begin_anew(hf, tmp_path):
    run = trainer(hf, tmp_path, callback(), Killed(5))
    with pytest.raises(KeyboardInterrupt):
        run.train()
    with pytest.raises(InputError, match="begin anew at update 0"):
        run.train()
    run.pop_callback(Killed)
    run.train(resume_from_checkpoint=True)
    assert len(frozen(run.model)) == 4


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
        warnings.simplefilter("error", SafWarning)
        # After the last event the patterns that there are say how long rows may be.
        for made, update in ((callback(schedule), 2), (others(), 6), (others(7), 6)):
            run = trainer(hf, tmp_path / "same", made, save_strategy="no")
            run.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{update}"))
            assert len(frozen(run.model)) == 4
    longer = [{name: torch.cat([ids, ids[:1]]) for name, ids in run.train_dataset[0].items()}]
    run = trainer(hf, tmp_path / "same", others(7), rows=longer, save_strategy="no")
    with pytest.raises(InputError, match=rf"rows of {LENGTH + 1} tokens .*, {LENGTH}, which the patterns"):
        run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))


LONGER = {
    "one_time": (saf.OneTime(0.5), "at=4", "at=10", saf.OneTime(4), [4]),
    "gradual": (
        saf.Gradual(0.5, 0.75, groups=2),
        "begin=4, end=6",
        "begin=10, end=15",
        saf.Gradual(4, 6, groups=2),
        [4, 6],
    ),
}


@pytest.mark.parametrize("name", LONGER)
def test_before_the_event_another_max_steps_is_told_to_move_it_and_whole_updates_keep_it(name, hf, tmp_path):
    schedule, then, now, whole, updates = LONGER[name]
    trainer(hf, tmp_path, callback(schedule)).train()
    checkpoint = str(tmp_path / "checkpoint-2")
    with pytest.raises(
        InputError, match=f"shares of max_steps.*max_steps=8, which is {then}, and max_steps=20 makes it {now}"
    ):
        trainer(hf, tmp_path, callback(schedule), max_steps=20).train(resume_from_checkpoint=checkpoint)
    made = callback(whole)
    run = trainer(hf, tmp_path, made, max_steps=20)
    run.train(resume_from_checkpoint=checkpoint)
    assert [event.update for event in made.events] == updates
    with pytest.raises(InputError, match="other settings of FreezeCallback"):
        trainer(hf, tmp_path, callback(saf.OneTime(6)), max_steps=20).train(resume_from_checkpoint=checkpoint)


def test_the_rest_of_several_events_comes_when_it_was_to_come(hf, tmp_path):
    schedule = saf.Gradual(0.5, 0.75, groups=2)
    trainer(hf, tmp_path, callback(schedule), save_steps=1).train()
    made = callback(schedule)
    run = trainer(hf, tmp_path, made, max_steps=20)
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert [event.update for event in made.events] == [4, 6]
    assert len(frozen(run.model)) == 4


def test_a_second_callback_is_refused_before_training(hf, tmp_path):
    made = trainer(hf, tmp_path, callback(saf.OneTime(2)), callback(saf.OneTime(5)))
    with pytest.raises(InputError, match=r"one FreezeCallback.*got 2: give one of them a schedule of several events"):
        made.train()
    assert made.state.global_step == 0


def test_rows_longer_than_the_calibration_are_refused_in_the_first_pass(hf, tmp_path):
    short = FreezeCallback(CONFIG, [tokens()[:, :7]], saf.OneTime(0.5))
    made = trainer(hf, tmp_path, short)
    with pytest.raises(InputError, match=r"rows of \d+ tokens are longer than those of the calibration, 7"):
        made.train()
    assert made.state.global_step == 0
    pruned = saf.FreezeConfig(count=4, operation="prune")
    trainer(hf, tmp_path / "pruned", FreezeCallback(pruned, [tokens()[:, :7]], saf.OneTime(0.5))).train()


@pytest.mark.parametrize("named", [False, True])
def test_longer_rows_of_evaluations_are_refused_before_training_where_they_can_be_seen(hf, tmp_path, named):
    rows = [{"input_ids": tokens(1, LENGTH, seed=seed)[0], "labels": tokens(1, LENGTH)[0]} for seed in range(4)]
    given = {"short": [{"input_ids": tokens(1, 7)[0]}], "long": rows} if named else rows
    options = {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "no"}
    made = FreezeCallback(CONFIG, [tokens(length=7)], saf.OneTime(0.5))
    run = trainer(hf, tmp_path, made, rows=[{name: each[:7] for name, each in row.items()} for row in rows], **options)
    run.eval_dataset = given
    with pytest.raises(InputError, match=rf"^in evaluations rows of {LENGTH} tokens are longer .* the calibration, 7,"):
        run.train()
    assert not run.state.global_step
    run.args.eval_strategy = "no"
    run.train()
    assert len(frozen(run.model)) == 4
