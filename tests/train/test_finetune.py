"""Finetuning from end to end: a user's own task, its arms and epochs, the exact loss, QuALITY, associative recall."""

import json
import math
import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import saf
from saf.calibration import gate_gradients
from saf.checkpoint import open_checkpoint
from saf.cli import main
from saf.cli.finetune import parse_words
from saf.compare import compare_runs
from saf.errors import CheckpointError, InputError
from saf.freeze_config import FreezeConfig
from saf.records.files import read_json, read_lines
from saf.records.run import RecordedRun, read_events
from saf.tasks import FinetuneSettings, FinetuneTask, MQARSettings, MQARTask
from saf.train import TrainConfig, continue_from, latest, loop, pretrain
from tests.train.conftest import SMALL
from tests.train.helpers import killed, killed_and_resumed

FREEZE = FreezeConfig(rate=0.25, max_fit_kl=10.0)
FREEZE_WORDS = ["--freeze.rate", "0.25", "--freeze.max-fit-kl", "10"]


# --- questions with choices


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
def parents(text_data, tmp_path_factory):
    """Last checkpoints of an ordinary and a frozen run."""
    found = {}
    for name, freeze in (("ordinary", None), ("freeze", FREEZE)):
        out = str(tmp_path_factory.mktemp("parents") / name)
        pretrain(TrainConfig(data=str(text_data), out=out, length=64, updates=4, freeze=freeze, **SMALL))
        found[name] = latest(f"{out}/checkpoints")
    return found


@pytest.fixture(scope="module")
def command(files, parents, tmp_path_factory):
    """Return a function that runs `saf finetune` on the own task and returns the run; once for equal names."""
    folder, done = tmp_path_factory.mktemp("finetuned"), {}

    def run(name, *words, parent="ordinary", task=True):
        if name not in done:
            named = ["--task", str(files / "train.jsonl"), "--test", str(files / "test.jsonl")] if task else []
            start = ["finetune", *named, "--parent", str(parents[parent]), "--out", str(folder / name)]
            assert main([*start, "--no-tensorboard", "--quiet", *map(str, words)]) == 0
            done[name] = RecordedRun.open(folder / name)
        return done[name]

    return run


def order_of(run):
    return [(line["update"], line["tokens"]) for line in run.metrics]


def test_a_users_own_task_in_three_commands(command, capsys):
    ordinary = command("chosen", "--peak-lr", "1e-3")
    choice = read_json(ordinary.folder / "epochs" / "choice.json")
    assert [one["epochs"] for one in choice["tried"]] == [1, 2, 3, 4, 5]
    assert choice["epochs"] == max(choice["tried"], key=lambda one: (one["accuracy"], -one["epochs"]))["epochs"]
    assert ordinary.finished_result()["updates"] == -(-choice["epochs"] * 54 // 16)
    assert not list(ordinary.folder.glob("epochs/*/checkpoints/*")), "weights and moments of epochs are removed"
    frozen = command("like", "--like", ordinary.folder, parent="freeze", task=False)
    assert order_of(ordinary) == order_of(frozen)
    assert not {**frozen.result, **ordinary.result}.get("missing"), "everything that settings ask for is recorded"
    capsys.readouterr()
    assert main(["compare", str(ordinary.folder), str(frozen.folder)]) == 0
    assert "McNemar" in capsys.readouterr().out
    record = read_json(frozen.folder / "compare.json")
    (change,) = record["tasks"].values()
    assert (change["questions"], record["heads"]) == (20, 2)
    pairs = zip(*(read_lines(run.folder / "answers.jsonl") for run in (ordinary, frozen)), strict=True)
    changes = [two["right"] - one["right"] for one, two in pairs]
    assert (change["gained"], change["lost"]) == (changes.count(1), changes.count(-1))
    accuracies = [run.finished_result()["accuracy"] for run in (ordinary, frozen)]
    assert change["difference"] == pytest.approx(accuracies[1] - accuracies[0])


def test_heads_are_frozen_during_finetuning_and_resuming_goes_on_inside_an_epoch(command, outcome, capsys):
    one = ("--epochs", "2", "--save-every", "1")
    ordinary = command("epochs-2", *one)
    words = (*one, "--calibration-sequences", "2", *FREEZE_WORDS)
    arm = command("during", *words)
    before = arm.events[0].update
    assert before == round(0.5 * ordinary.finished_result()["updates"])
    assert (order_of(arm), arm.config["train"]) == (order_of(ordinary), ordinary.config["train"])
    # Until its event the arm is the ordinary model on the same examples: its losses are the same numbers.
    losses = [[line["loss"] for line in run.metrics[:before]] for run in (ordinary, arm)]
    assert losses[0] == losses[1]
    killed(lambda: command("again", *words), loop, "run_update", before + 2)
    folder = arm.folder.parent
    assert main(["finetune", "--out", str(folder / "again"), "--resume", "--epochs", "3"]) == 2
    assert "updates must be 7, got 11" in " ".join(capsys.readouterr().err.split())
    again = command("again", "--resume", task=False)
    assert outcome(arm.folder) == outcome(again.folder)


def test_a_run_killed_while_it_chose_its_epochs_goes_on_as_it_began(command, files, parents, outcome, tmp_path, capsys):
    whole = command("chosen", "--peak-lr", "1e-3")
    named = ["--task", str(files / "train.jsonl"), "--test", str(files / "test.jsonl"), "--quiet", "--no-tensorboard"]
    words = ["finetune", *named, "--parent", str(parents["ordinary"]), "--out", str(tmp_path / "run")]
    assert main([*words, "--resume"]) == 2
    assert "holds no run to resume" in capsys.readouterr().err
    killed(lambda: main([*words, "--peak-lr", "1e-3", "--keep", "3"]), loop, "run_update", 6)
    assert main([*words, "--peak-lr", "1e-3", "--keep", "3"]) == 2
    assert "holds a run already; resume it" in " ".join(capsys.readouterr().err.split())
    assert main([*words, "--peak-lr", "2e-3", "--keep", "3", "--resume"]) == 2
    assert "peak_lr must be 0.001, got 0.002" in capsys.readouterr().err
    assert main(["finetune", "--out", str(tmp_path / "run"), "--resume", "--quiet"]) == 0
    assert outcome(tmp_path / "run") == outcome(whole.folder)
    assert read_json(tmp_path / "run" / "config.json")["settings"]["keep"] == 3


def test_finetuning_that_cannot_work_is_refused(capsys, files, parents, tmp_path):
    few = tmp_path / "few.jsonl"
    few.write_text("".join((files / "train.jsonl").read_text().splitlines(keepends=True)[:9]))
    train, test = str(files / "train.jsonl"), ["--test", str(files / "test.jsonl")]
    for parent, words, expected in (
        ("freeze", ["--task", train, *test], "epochs must be chosen by the ordinary model; "),
        ("ordinary", ["--task", train, *test, "--warmup", "0.1"], "constant rate"),
        ("ordinary", ["--task", train, *test, "--epochs", "1", "--update-budget", "9"], "must be None with epochs"),
        ("ordinary", ["--task", str(few), *test], "must have different updates, got 1, 1, 2, 2, 3"),
        ("ordinary", ["--task", "sst2"], "needs files"),
    ):
        out = tmp_path / "refused"
        assert main(["finetune", *words, "--parent", str(parents[parent]), "--out", str(out), "--quiet"]) == 2
        assert expected in " ".join(capsys.readouterr().err.split())
        assert not out.exists(), "nothing was trained before it was refused"


# --- the loss is the mean over the answer tokens of an update, however it is cut into micro-batches

ANSWERS = ["no", "the loss of a head", "of", "the update of a pattern of the model of the window", "a", "rate of loss"]


@pytest.fixture(scope="module")
def unequal(text_data, tmp_path_factory):
    """Settings of one update on eight examples or nine, and the folder of its runs."""
    folder = tmp_path_factory.mktemp("unequal")
    for name, count in (("train", 12), ("test", 2)):
        records = [
            {"text": f"freeze {name} {number}: ", "choices": ANSWERS, "answer": number % len(ANSWERS)}
            for number in range(count)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return TrainConfig(
        **{**SMALL, "batch_size": 1},
        task="jsonl",
        data=str(folder / "train.jsonl"),
        finetuning=FinetuneSettings(test=str(folder / "test.jsonl"), tokenizer=str(text_data)),
        out=str(folder),
        length=64,
        updates=1,
        save_at=(0.0,),
        clip=None,
    )


@pytest.mark.parametrize(("size", "accumulation"), [(3, 3), (1, 8)])
def test_micro_batches_weigh_as_many_answer_tokens_as_they_have(unequal, size, accumulation):
    """A run's only update has loss and gradient of float64, each example alone and without padding."""
    folder, count = Path(unequal.out, f"{size} x {accumulation}"), size * accumulation
    pretrain(replace(unequal, out=str(folder), batch_size=size, accumulation=accumulation))
    task = FinetuneTask(replace(unequal, batch_size=count, accumulation=1), length=64)
    model = saf.load(folder / "checkpoints" / "step-0").double()
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for each in (task.examples[number] for number in task.numbers(0, count)):
        ids, begin = torch.tensor(each.sequence), len(each.prompt)
        log_probs = F.log_softmax(model(ids[None, :-1])[0], -1)
        total = total - log_probs[torch.arange(begin - 1, len(ids) - 1), ids[begin:]].sum()
        tokens += len(ids) - begin
    (total / tokens).backward()
    (line,) = read_lines(folder / "metrics.jsonl")
    assert line["loss"] == pytest.approx(total.item() / tokens, rel=1e-6)
    checkpoint = open_checkpoint(folder / "checkpoints" / "step-1")
    beta, moments = checkpoint.state["optimizer_groups"][0]["betas"][0], checkpoint.tensors("optimizer")
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradient = moments[f"{name}.exp_avg"] / (1 - beta)
            assert (gradient - parameter.grad).norm() <= 1e-5 * parameter.grad.norm(), name


# --- associative recall

MQAR = MQARSettings(
    length=16, pairs=2, vocabulary=40, test_lengths=(16, 32), test_pairs=(4, 2), test_examples=8, development=8
)
RECALL = "--mqar.length 16 --mqar.pairs 2 --mqar.vocabulary 40 --mqar.test-lengths 16 32 --mqar.test-pairs 4 2"
SIZES = "--mqar.test-examples 8 --mqar.development 8 --eval-windows 8 --calibration-sequences 4 --no-tensorboard"
WORDS = ["--task", "mqar", *RECALL.split(" "), *SIZES.split(" ")]


@pytest.fixture
def recall(settings):
    """Return a function that makes the settings of a run of associative recall."""
    return partial(settings, task="mqar", mqar=MQAR, eval_windows=8)


@pytest.mark.filterwarnings("ignore:the task is not learnt")
def test_recall_resumes_with_its_reports_and_goes_on_replaced_or_pruned(recall, outcome):
    whole, config = (recall(name, freeze=FREEZE, report_at=(0, 5, 12)) for name in ("whole", "killed"))
    expected = pretrain(whole)
    assert list(expected["reports"]) == ["0", "5", "12"]
    assert expected["reports"]["12"]["recall"] == expected["recall"]
    assert killed_and_resumed(config, loop, "run_update", 8)["reports"] == expected["reports"]
    assert outcome(config.out) == outcome(whole.out)
    assert read_events(whole.out)[0].values["length"] == 32, "the whole context is calibrated on"
    with pytest.raises(CheckpointError, match="was trained on other data"):
        pretrain(continue_from(expected["checkpoint"], out=f"{whole.out}-other", seed=5, updates=14))
    plain = recall("plain", updates=4)
    parent = pretrain(plain)["checkpoint"]
    gates = gate_gradients(saf.load(parent), MQARTask(plain, length=32).calibration())
    freeze = FreezeConfig(rate=0.25, score="gate_taylor", operation="prune")
    pruned = pretrain(continue_from(parent, out=recall("pruned").out, freeze=freeze, updates=6))
    (event,) = read_events(recall("pruned").out)
    scores = (gates / gates.norm(dim=1, keepdim=True)).flatten()
    assert sorted(event.heads) == sorted([list(divmod(i, 4)) for i in scores.argsort()[:2].tolist()])
    again = continue_from(pruned["checkpoint"], out=recall("on").out, fresh=True, seed=5, updates=3)
    recovered = pretrain(again)
    assert recovered["provenance"]["pruned"] == event.heads
    after = open_checkpoint(recovered["checkpoint"])
    assert all(int(state["step"]) == 3 for state in after.optimizer(after.model()).state.values())
    assert after.state["sampler_position"] == 3 * 8


@pytest.mark.filterwarnings("ignore:the task is not learnt")
def test_a_checkpoint_is_finetuned_on_recall_other_arms_like_it_and_both_compared(text_data, tmp_path, capsys):
    text = TrainConfig(data=str(text_data), out=str(tmp_path / "text"), length=32, updates=2, eval_every=0, **SMALL)
    pretrain(text)

    def command(name, *words, parent="text/checkpoints/step-2"):
        start = ["finetune", "--parent", str(tmp_path / parent), "--out", str(tmp_path / name), "--quiet"]
        assert main([*start, *map(str, words)]) == 0
        return RecordedRun.open(tmp_path / name)

    ordinary = command("ordinary", *WORDS, "--updates", 4)
    settings = TrainConfig.from_dict(ordinary.config["settings"])
    assert (settings.peak_lr, settings.weight_decay, settings.batch_size, settings.min_lr_ratio) == (1e-4, 0.01, 16, 1)
    model = saf.load(ordinary.finished_result()["checkpoint"])
    # All output classes compete, so that an untrained answer is about as likely as any of them.
    assert ordinary.finished_result()["report_loss"] == pytest.approx(math.log(model.config.vocab_size), abs=1.0)
    frozen = command("frozen", "--like", ordinary.folder, *FREEZE_WORDS)
    results = [run.finished_result() for run in (ordinary, frozen)]
    assert [one["arm"] for one in results] == ["ordinary", "frozen"]
    assert len({one["provenance"]["data"]["train"] for one in results}) == 1
    capsys.readouterr()
    assert main(["compare", str(ordinary.folder), str(frozen.folder)]) == 0
    assert "examples of recall with more" in " ".join(capsys.readouterr().out.split())
    record = read_json(frozen.folder / "compare.json")
    assert "the task is not learnt" in record["not_learnt"]
    for place, test in enumerate(record["tasks"].values()):
        assert test["accuracy"] == [one["recall"]["tests"][place]["accuracy"] for one in results]
        assert test["ci95"][0] < test["difference"] < test["ci95"][1]
    # Recovery after immediate replacement: one run, measured before its first update and later.
    parent = "ordinary/checkpoints/step-4"
    more = ["--updates", 3, "--report-at", 0, 1, 3, "--save-every", 0, *FREEZE_WORDS]
    replaced = command("replaced", *WORDS[:2], *more, parent=parent)
    result = replaced.finished_result()
    assert list(result["reports"]) == ["0", "1", "3"]
    assert [event.update for event in replaced.events] == [0]
    assert result["provenance"]["seed"] == results[0]["provenance"]["seed"] + 1_000
    with open(frozen.folder / "answers.jsonl", "a") as file:
        file.write("{}\n")
    with pytest.raises(InputError, match=r"answers\.jsonl is damaged"):
        compare_runs(ordinary, RecordedRun.open(frozen.folder))


def test_words_that_recall_has_no_use_for_are_refused_and_tests_follow_the_context(parents, tmp_path):
    start = ["--task", "mqar", "--parent", str(parents["ordinary"]), "--out", str(tmp_path / "run")]
    with pytest.raises(InputError, match="have no effect on mqar"):
        parse_words([*start, "--test", "file"])
    with pytest.raises(InputError, match="epochs must be left out"):
        parse_words([*start, "--epochs", "2"]).run()
    assert MQARSettings().within(2_048).tests == MQARSettings().tests[:-1]
