"""Finetuning from end to end: a user's own task, its arms, epochs, resumption and comparison."""

import json
import random
from pathlib import Path

import pytest
import torch

from saf.cli import main
from saf.errors import CompareError, InputError
from saf.evaluate.answers import compare_answers
from saf.freeze_config import FreezeConfig
from saf.records.files import read_json, read_lines
from saf.records.run import RecordedRun
from saf.surgery import pattern_parameters
from saf.train import finetuning, latest, load_model, loop, pretrain
from tests.train.conftest import SMALL, assert_patterns_train_without_decay
from tests.train.killed import Killed, die_at


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Training and test examples: whether a text has the word head."""
    folder, rng = tmp_path_factory.mktemp("own-task"), random.Random(0)
    for name, count in (("train", 60), ("test", 20)):
        with open(folder / f"{name}.jsonl", "w") as stream:
            for number in range(count):
                words = [rng.choice(["the", "of", "loss", "rate"]) for _ in range(rng.randint(2, 6))]
                if number % 2:
                    words[rng.randrange(len(words))] = "head"
                record = {"id": f"{name}-{number}", "text": " ".join(words), "choices": [" yes", " no"]}
                stream.write(json.dumps({**record, "answer": [" no", " yes"][number % 2]}) + "\n")
    return folder


@pytest.fixture(scope="module")
def parents(data, tmp_path_factory):
    """Last checkpoints of an ordinary, a frozen and a pruned run, and of one whose patterns train."""
    from saf.train import TrainConfig

    found = {}
    for name in ("ordinary", "freeze", "prune", "trained"):
        freeze = {
            "ordinary": None,
            "freeze": FreezeConfig(rate=0.25, max_fit_kl=10.0),
            "prune": FreezeConfig(rate=0.25, operation="prune"),
            "trained": FreezeConfig(rate=0.25, max_fit_kl=10.0, trainable=True),
        }[name]
        out = str(tmp_path_factory.mktemp("parents") / name)
        config = TrainConfig(data=str(data), out=out, length=64, updates=4, freeze=freeze, **SMALL)
        pretrain(config)
        found[name] = latest(f"{config.out}/checkpoints")
    return found


@pytest.fixture(scope="module")
def command(files, parents, tmp_path_factory):
    """Return a function that runs `saf finetune` on the own task and returns the run; once for equal names."""
    folder, done = tmp_path_factory.mktemp("finetuned"), {}

    def run(name, *words, parent="ordinary", task=True):
        if name not in done:
            named = ["--task", str(files / "train.jsonl"), "--test", str(files / "test.jsonl")] if task else []
            start = ["finetune", *named, "--parent", str(parents[parent]), "--out", str(folder / name)]
            assert main([*start, "--no-tensorboard", "--quiet", *words]) == 0
            done[name] = RecordedRun.open(folder / name)
        return done[name]

    return run


def order_of(run):
    """What every update was, however it went."""
    return [(line["update"], line["tokens"]) for line in run.metrics]


def test_a_users_own_task_in_three_commands(command, capsys, tmp_path):
    ordinary = command("chosen", "--peak-lr", "1e-3")
    choice = read_json(ordinary.folder / "epochs" / "choice.json")
    assert [one["epochs"] for one in choice["tried"]] == [1, 2, 3, 4, 5]
    assert choice["epochs"] == max(choice["tried"], key=lambda one: (one["accuracy"], -one["epochs"]))["epochs"]
    assert ordinary.finished_result()["updates"] == -(-choice["epochs"] * 54 // 16)
    assert not list(ordinary.folder.glob("epochs/*/checkpoints/*")), "weights and moments of epochs are let go"
    frozen = command("like", "--like", str(ordinary.folder), parent="freeze", task=False)
    capsys.readouterr()
    assert main(["compare", str(ordinary.folder), str(frozen.folder)]) == 0
    shown = capsys.readouterr().out
    assert "McNemar" in shown
    record = read_json(frozen.folder / "compare.json")
    assert record["questions"] == 20
    assert record["heads"] == [0, 2]
    pairs = zip(*(read_lines(run.folder / "answers.jsonl") for run in (ordinary, frozen)), strict=True)
    changes = [two["right"] - one["right"] for one, two in pairs]
    assert (record["gained"], record["lost"]) == (changes.count(1), changes.count(-1))
    accuracies = [run.finished_result()["accuracy"] for run in (ordinary, frozen)]
    assert record["difference"] == pytest.approx(accuracies[1] - accuracies[0])
    assert order_of(ordinary) == order_of(frozen)
    assert frozen.lacks == ordinary.lacks == []
    assert main(["report", str(ordinary.folder), str(frozen.folder), "--out", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "Answers to the same 20 questions" in page
    assert "Accuracy" in page


def test_all_arms_see_the_same_examples_and_heads_can_be_frozen_or_pruned_during_finetuning(command):
    one = ("--epochs", "2", "--save-every", "1")
    ordinary = command("epochs-2", *one)
    arms = [
        command("pruned", "--like", str(ordinary.folder), parent="prune", task=False),
        command("during", *one, "--calibration-sequences", "2", "--freeze.rate", "0.25", "--freeze.max-fit-kl", "10"),
    ]
    assert [run.arm for run in arms] == ["pruned", "frozen"]
    assert arms[1].events[0].update == round(0.5 * ordinary.finished_result()["updates"])
    for run in arms:
        assert order_of(run) == order_of(ordinary)
        assert run.config["train"] == ordinary.config["train"]
        assert run.config["data"]["fingerprint"] == ordinary.config["data"]["fingerprint"]
    # Until its event the arm is the ordinary model on the same examples: its losses are the same numbers.
    before = arms[1].events[0].update
    losses = [[line["loss"] for line in run.metrics[:before]] for run in (ordinary, arms[1])]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("parent", ["trained", "ordinary"])
def test_trained_patterns_train_on_a_task_and_do_not_decay(command, parents, parent):
    """Whatever the weight decay is, the first update moves patterns to the same bits; matrices it does not."""
    now = ["--calibration-sequences", "2", "--schedule.at", "0", "--freeze.rate", "0.25", "--freeze.max-fit-kl", "10"]
    freeze = [*now, "--freeze.trainable"] if parent == "ordinary" else []
    for decay in ("0", "0.5"):
        one = ("--epochs", "1", "--save-every", "1", "--keep", "0", "--peak-lr", "1e-3", "--weight-decay", decay)
        command(f"{parent} {decay}", *one, *freeze, parent=parent)
    folders = [command(f"{parent} {decay}").folder / "checkpoints" for decay in ("0", "0.5")]
    assert_patterns_train_without_decay(*(folder / "step-1" for folder in folders), 0.5)
    before = folders[0] / "step-0" if parent == "ordinary" else parents[parent]
    after = pattern_parameters(load_model(folders[0] / "step-4"))
    if parent == "trained":
        moved = zip(pattern_parameters(load_model(before)), after, strict=True)
        assert all(not torch.equal(*pair) for pair in moved)
    assert len(after) == 2 * 2


def test_epochs_are_chosen_by_the_ordinary_arm_alone(capsys, files, parents, tmp_path):
    words = ["finetune", "--task", str(files / "train.jsonl"), "--test", str(files / "test.jsonl")]
    for parent, more in (("freeze", []), ("ordinary", ["--freeze.rate", "0.25"])):
        out = str(tmp_path / f"refused-{parent}")
        assert main([*words, "--parent", str(parents[parent]), "--out", out, *more]) == 2
        assert "epochs are chosen by the ordinary model alone" in capsys.readouterr().err
        assert not Path(out).exists(), "nothing was trained before it was refused"


def test_so_few_examples_that_epochs_cannot_be_told_apart_are_refused(capsys, files, parents, tmp_path):
    few = tmp_path / "few.jsonl"
    few.write_text("".join((files / "train.jsonl").read_text().splitlines(keepends=True)[:9]))
    start = ["finetune", "--task", str(few), "--test", str(files / "test.jsonl"), "--out", str(tmp_path / "run")]
    assert main([*start, "--parent", str(parents["ordinary"]), "--quiet"]) == 2
    assert "have 1, 1, 2, 2, 3 updates, which cannot be told apart" in capsys.readouterr().err


def test_training_goes_on_exactly_inside_an_epoch_and_as_it_began(command, outcome, monkeypatch, capsys):
    whole = command("epochs-2", "--epochs", "2", "--save-every", "1")
    real, done = loop.run_update, []

    def killed(run):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(run.update)
        return real(run)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "run_update", killed)
        with pytest.raises(AssertionError):
            command("again", "--epochs", "2", "--save-every", "1")
    assert done == [0, 1]  # an epoch has more than three updates
    folder = whole.folder.parent
    for words, told in (
        (["--epochs", "3"], "the run to resume has 7 updates, epochs=3 would be 11"),
        (["--parent", str(folder / "other")], f"got parent {folder / 'other'}. Leave it out"),
        (["--peak-lr", "1"], "cannot resume with other settings"),
        (["--sampler", "random"], "sampler has an effect on text alone"),
    ):
        assert main(["finetune", "--out", str(folder / "again"), "--resume", *words]) == 2
        assert told in " ".join(capsys.readouterr().err.split())
    again = command("again", "--resume", task=False)
    assert outcome(whole.folder) == outcome(again.folder)
    read = [(run.folder / "answers.jsonl").read_bytes() for run in (whole, again)]
    assert read[0] == read[1]


def test_epochs_that_were_tried_with_other_settings_are_not_taken_over(files, parents, tmp_path, monkeypatch, capsys):
    named = ["--task", str(files / "train.jsonl"), "--test", str(files / "test.jsonl"), "--quiet", "--no-tensorboard"]
    words = ["finetune", *named, "--parent", str(parents["ordinary"]), "--out", str(tmp_path / "run")]
    with monkeypatch.context() as patch:
        die_at(patch, finetuning, "pretrain", 2)
        with pytest.raises(Killed):
            main(words)
    assert capsys.readouterr().err.count("examples are in") == 1  # told by the run, not by counting its updates
    assert main([*words, "--peak-lr", "1e-3", "--resume"]) == 2
    assert "peak_lr: the run has 2e-05, got 0.001" in capsys.readouterr().err
    assert main([*words, "--lr-by", "elapsed", "--time-budget-seconds", "9", "--epochs", "1"]) == 2
    assert "time_budget_seconds must be None where epochs say" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        die_at(patch, finetuning, "_let_go_", 1)  # the second epoch has ended, and the first one is still there
        with pytest.raises(Killed):
            main([*words, "--resume"])
    assert len(list(tmp_path.glob("run/epochs/*/checkpoints/*"))) == 2
    assert main([*words, "--resume"]) == 0
    assert len(read_json(tmp_path / "run" / "epochs" / "choice.json")["tried"]) == 5
    assert not list(tmp_path.glob("run/epochs/*/checkpoints/*"))


@pytest.mark.parametrize(("module", "name", "call"), [(loop, "run_update", 6), (finetuning, "_let_go_", 5)])
def test_a_run_killed_while_it_chose_its_epochs_goes_on_as_it_began(
    command, files, parents, outcome, tmp_path, monkeypatch, capsys, module, name, call
):
    """In the second epoch, or with the choice written and the run to come not begun; the folder alone is named then."""
    whole = command("chosen", "--peak-lr", "1e-3")
    named = ["--task", str(files / "train.jsonl"), "--test", str(files / "test.jsonl"), "--quiet", "--no-tensorboard"]
    words = ["finetune", *named, "--parent", str(parents["ordinary"]), "--out", str(tmp_path / "run")]
    with monkeypatch.context() as patch:
        die_at(patch, module, name, call)
        with pytest.raises(Killed):
            main([*words, "--peak-lr", "1e-3", "--keep", "3"])
    assert main([*words, "--peak-lr", "1e-3", "--keep", "3"]) == 2
    assert "was choosing its epochs; resume it, or choose another folder" in " ".join(capsys.readouterr().err.split())
    assert main(["finetune", "--out", str(tmp_path / "run"), "--resume", "--quiet"]) == 0
    assert outcome(tmp_path / "run") == outcome(whole.folder)
    read = [(folder / "answers.jsonl").read_bytes() for folder in (whole.folder, tmp_path / "run")]
    assert read[0] == read[1]
    tried = [read_json(folder / "epochs" / "choice.json")["tried"] for folder in (whole.folder, tmp_path / "run")]
    assert tried[0] == tried[1]
    assert read_json(tmp_path / "run" / "config.json")["settings"]["keep"] == 3


def test_runs_that_were_finetuned_differently_are_not_compared(command):
    runs = [
        command("epochs-2", "--epochs", "2", "--save-every", "1"),
        command("epochs-1", "--epochs", "1"),
    ]
    with pytest.raises(CompareError, match="trained differently"):
        compare_answers(*runs)
    assert any("train.updates" in line for line in compare_answers(*runs, allow_differences=True)["differences"])


def test_words_that_do_not_say_what_to_finetune_on_are_refused(parents, tmp_path, capsys):
    start = ["finetune", "--parent", str(parents["ordinary"]), "--out", str(tmp_path / "none")]
    for words, told in (([], "needs a task"), (["--task", "sst2"], "needs files"), (["--task", "text"], "to finetune")):
        assert main([*start, *words]) == 2
        assert told in capsys.readouterr().err


def test_runs_of_different_tasks_are_told_from_one_another(command, parents, tmp_path, capsys):
    ordinary = command("epochs-1", "--epochs", "1")
    text = parents["freeze"].parents[1]
    assert main(["compare", str(ordinary.folder), str(text)]) == 2
    assert f"{text} was not judged by answers; compare it with runs of its own task" in capsys.readouterr().err
    words = ["finetune", "--like", str(ordinary.folder), "--task", "sst2", "--out", str(tmp_path / "x")]
    assert main([*words, "--parent", str(parents["freeze"])]) == 2
    assert "was finetuned on jsonl; leave --task sst2 out beside --like" in capsys.readouterr().err


def test_a_changing_rate_cannot_choose_epochs(files, parents, tmp_path):
    from saf.cli.finetune import parse_words

    words = ["--task", str(files / "train.jsonl"), "--test", str(files / "test.jsonl"), "--warmup", "0.1"]
    given = parse_words([*words, "--parent", str(parents["ordinary"]), "--out", str(tmp_path / "run")])
    with pytest.raises(InputError, match="constant rate"):
        given.run()
