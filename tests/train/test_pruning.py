"""Runs that prune heads: exact resume, undo, schedules, the heads of another arm, and pruning from initialisation."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

import saf.train.events as events
import saf.train.loop as loop
from saf.adapters import adapter_for
from saf.cli import main
from saf.cli.parsing import read_heads
from saf.cli.training import result_table
from saf.errors import InputError
from saf.freeze_config import FreezeConfig
from saf.records.events import heads_in_force, read_events
from saf.records.files import read_json, read_lines
from saf.records.run import RecordedRun
from saf.report.page import write_report
from saf.schedules import Freeze, Gradual, OneTime, Prune, TrainLoss, Undo, ValidationBudget, train_loss
from saf.schedules.train_loss import TrainLossProposer
from saf.tasks import TASKS
from saf.train import continue_from, load_model, open_checkpoint, pretrain
from saf.train.run import Run
from tests.surgery.test_prune import Small, rows_of
from tests.train.killed import killed_and_resumed, told
from tests.train.test_events import Listed

PRUNE = FreezeConfig(operation="prune", rate=0.5)
FREEZE = FreezeConfig(rate=0.5, max_fit_kl=10.0)


def pruned(checkpoint) -> list[list[int]]:
    return adapter_for(load_model(checkpoint)).heads("pruned").to_list()


def test_a_run_prunes_what_it_would_freeze_and_says_so(settings, finished):
    folder = finished(settings(freeze=PRUNE, keep=0), "pruned")
    frozen = finished(settings(freeze=FREEZE, keep=0), "frozen")
    (event,), (beside,) = read_events(folder), read_events(frozen)
    assert told(folder) == [(1, "prune", 6, 4, None)]
    assert event.heads == beside.heads
    assert event.values["scores"] == beside.values["scores"]
    assert set(event.seconds) == {"capture", "statistics", "score", "select", "prune"}
    assert (event.values["pruned_in_all"], event.values["fit_kl"]) == (4, [])
    result = read_json(folder / "result.json")
    assert (result["arm"], result["provenance"]["heads"], result["provenance"]["pruned"]) == ("pruned", [], event.heads)
    assert result["intervention"]["heads"] == event.heads
    run = RecordedRun.open(folder)
    assert (run.arm, run.frozen_heads, run.pruned_heads, run.edited_heads) == ("pruned", [], event.heads, event.heads)
    assert pruned(folder / "checkpoints" / "step-6") == []
    assert pruned(folder / "checkpoints" / "step-12") == event.heads
    words = {"before_prune": "loss_before", "after_prune": "loss_after"}
    around = {line["when"]: line["loss"] for line in read_lines(folder / "evaluations.jsonl")}
    assert all(around[when] == event.values[name] for when, name in words.items())
    assert {when for when in around if when.endswith("freeze")} == set()


@pytest.mark.parametrize(
    ("module", "name", "call"),
    [(events, "freeze_", 1), (Run, "record_event", 1), (loop, "run_update", 8), (loop, "run_update", 11)],
    ids=["measuring", "between-measurement-and-outcome", "right-after", "later"],
)
def test_a_run_that_prunes_resumes_bit_for_bit(settings, finished, outcome, monkeypatch, module, name, call):
    folder = finished(settings(freeze=PRUNE, keep=0), "pruned")
    config = settings(freeze=PRUNE, keep=0)
    killed_and_resumed(config, monkeypatch, module, name, call)
    assert outcome(config.out) == outcome(folder)
    assert told(config.out) == told(folder)


def test_a_pruned_arm_is_the_same_as_one_run_that_prunes_and_goes_on_as_a_parent(settings, finished, outcome):
    parent = finished(settings(), "ordinary") / "checkpoints" / "step-6"
    arm = continue_from(parent, out=settings("arm").out, freeze=PRUNE)
    pretrain(arm)
    single = finished(settings(freeze=PRUNE, keep=0), "pruned")
    for name in ("model.safetensors", "optimizer.safetensors", "saf.safetensors", "saf.json", "report_loss"):
        assert outcome(arm.out)[name] == outcome(single)[name], name
    later = continue_from(single / "checkpoints" / "step-9", out=settings("later").out)
    result = pretrain(later)
    assert (result["arm"], result["provenance"]["pruned"]) == ("pruned", read_events(single)[0].heads)
    assert outcome(later.out)["model.safetensors"] == outcome(single)["model.safetensors"]


def test_the_page_and_the_tables_speak_of_pruned_heads(settings, finished, tmp_path, capsys):
    runs = [finished(settings(), "ordinary"), finished(settings(freeze=PRUNE, keep=0), "pruned")]
    page = write_report(runs, tmp_path).read_text()
    assert "<h1>4 pruned of 8 attention heads: perplexity" in page
    assert "4 of 8 pruned" in page
    assert main(["compare", *map(str, runs)]) == 0
    assert main(["inspect", str(runs[1])]) == 0
    assert "0 of 8 frozen; 4 pruned: " in " ".join(capsys.readouterr().out.split())


def test_a_run_that_prunes_heads_of_a_frozen_parent_tells_how_many_are_what(settings, finished, tmp_path, capsys):
    ordinary, parent = finished(settings(), "ordinary"), finished(settings(freeze=FREEZE, keep=0), "frozen")
    freeze, out = replace(PRUNE, count=2), settings("mixed").out
    arm = continue_from(parent / "checkpoints" / "step-9", out=out, freeze=freeze, schedule=OneTime(at=10))
    result = pretrain(replace(arm, quiet=False))
    assert "2 of 8 heads pruned by variance, 4 frozen and 2 pruned in all; took" in capsys.readouterr().err
    assert {"frozen_in_all": 4, "pruned_in_all": 2}.items() <= read_events(out)[0].values.items()
    assert result["arm"] == "frozen and pruned"
    heads = sorted(map(tuple, result["provenance"]["heads"] + result["provenance"]["pruned"]))
    for name in (Path(out), Path(out, "events.jsonl")):
        assert read_heads([str(name)]) == tuple(heads), "the parent's, too"
    assert len(heads) == 6
    shutil.copytree(out, tmp_path / "unfinished")
    (tmp_path / "unfinished" / "result.json").unlink()
    assert read_heads([str(tmp_path / "unfinished")]) == tuple(heads)
    rows = {row[0]: str(row[1]) for row in map(tuple, result_table(result).rows)}
    assert rows["heads pruned"] == "2 after update 10, 4 frozen and 2 pruned in all"
    page = write_report([ordinary, out], tmp_path).read_text()
    assert "<h1>4 frozen and 2 pruned of 8 attention heads" in page


@pytest.mark.parametrize("score", ["gate_taylor", "random"])
def test_a_run_prunes_by_the_score_that_it_is_told(settings, score):
    freeze = replace(PRUNE, score=score, match="variance" if score == "random" else None, seed=3)
    config = settings(freeze=freeze, updates=8, save_every=0, eval_every=0)
    result = pretrain(config)
    (event,) = read_events(config.out)
    assert (event.values["score_name"], len(event.heads)) == (score, 4)
    assert result["provenance"]["pruned"] == event.heads


def test_the_heads_of_another_arm_are_named_by_its_folder_or_its_record(settings, finished):
    frozen = finished(settings(freeze=FREEZE, keep=0), "frozen")
    heads = tuple(map(tuple, read_events(frozen)[0].heads))
    assert read_heads([str(frozen)]) == read_heads([str(frozen / "events.jsonl")]) == heads
    parent, out = frozen / "checkpoints" / "step-6", settings("same").out
    words = f"--parent {parent} --out {out} --freeze.operation prune --freeze.heads {frozen} --quiet"
    assert main(["pretrain", *words.split()]) == 0
    assert read_json(Path(out) / "result.json")["provenance"]["pruned"] == [list(head) for head in heads]


def test_a_checkpoint_is_pruned_by_the_command_and_trained_on(settings, finished, tmp_path, capsys):
    parent = finished(settings(), "ordinary") / "checkpoints" / "step-6"
    words = f"{parent} --operation prune --rate 0.5 --sequences 4 --out {tmp_path / 'made'} --device cpu"
    assert main(["freeze", *words.split()]) == 0
    said = capsys.readouterr().out
    assert "4 of 8 heads pruned by variance" in said
    assert "fit KL" not in said
    (event,) = read_events(tmp_path / "made")
    assert (event.kind, pruned(tmp_path / "made")) == ("prune", event.heads)
    assert event.heads == read_events(finished(settings(freeze=PRUNE, keep=0), "pruned"))[0].heads
    arm = continue_from(tmp_path / "made", out=settings("on").out)
    result = pretrain(arm)
    assert (result["arm"], result["provenance"]["pruned"]) == ("pruned", event.heads)
    assert [each.values["inherited"] for each in read_events(arm.out)] == [True]
    assert main(["freeze", *words.split(), "--backend", "toeplitz"]) == 2
    assert "leave backend out" in capsys.readouterr().err


GRADUAL = Gradual(begin=0.25, end=0.75, groups=2)


@pytest.mark.parametrize(("name", "call"), [("freeze_", 2), ("_carry_out_", 2)])
def test_gradual_pruning_resumes_bit_for_bit(settings, finished, outcome, monkeypatch, name, call):
    folder = finished(settings(freeze=PRUNE, schedule=GRADUAL, keep=0), "gradual")
    assert told(folder) == [(1, "prune", 3, 2, None), (2, "prune", 9, 2, None)]
    first, second = read_events(folder)
    assert sorted(first.values["deferred"]) == second.heads
    assert pruned(folder / "checkpoints" / "step-12") == heads_in_force([first, second])
    config = settings(freeze=PRUNE, schedule=GRADUAL, keep=0)
    killed_and_resumed(config, monkeypatch, events, name, call)
    assert outcome(config.out) == outcome(folder)
    assert told(config.out) == told(folder)


@pytest.mark.parametrize("call", [None, 1], ids=["whole", "killed-while-undoing"])
def test_groups_that_cost_too_much_are_undone_as_if_never_pruned(settings, finished, outcome, monkeypatch, call):
    real = Run.controller_loss
    dear = {"after_prune": 0.5, "before_undo": 0.5}
    monkeypatch.setattr(Run, "controller_loss", lambda run, when, **more: real(run, when, **more) + dear.get(when, 0.0))
    config = settings(freeze=PRUNE, schedule=ValidationBudget(begin=0.5, every=0.25))
    result = killed_and_resumed(config, monkeypatch, events, "uninstall_", call) if call else pretrain(config)
    assert told(config.out) == [
        (1, "prune", 6, 1, 2),
        (2, "undo", 6, 1, None),
        (3, "prune", 9, 1, 4),
        (4, "undo", 9, 1, None),
    ]
    assert (result["arm"], result["provenance"]["pruned"]) == ("pruned", [])
    ordinary, found = outcome(finished(settings(), "ordinary")), outcome(config.out)
    for name in ("model.safetensors", "optimizer.safetensors", "metrics", "report_loss"):
        assert found[name] == ordinary[name], name


def test_train_loss_undoes_a_pruned_group_that_is_not_absorbed(settings, outcome, monkeypatch):
    monkeypatch.setattr(train_loss, "_BURN_IN", (4, 0.0))
    monkeypatch.setattr(train_loss, "_HALF_LIFE", (2, 0.0))
    observe = TrainLossProposer.observe

    def shown(proposer, update, loss):
        raised = 0.5 if proposer.decisions.step else 0.0
        observe(proposer, update, max(4 - update / 20, 3.7) + 0.02 * (-1) ** update + raised)

    monkeypatch.setattr(TrainLossProposer, "observe", shown)
    few = {"updates": 40, "batch_size": 1, "accumulation": 1, "eval_every": 0, "save_every": 34, "eval_windows": 1}

    def quick(name):
        return settings(name, freeze=PRUNE, schedule=TrainLoss(multiplier=2.0), calibration_sequences=2, **few)

    pretrain(quick("whole"))
    folder = quick("whole").out
    assert told(folder) == [(1, "prune", 30, 1, 2), (2, "undo", 39, 1, None)]
    killed_and_resumed(quick("killed"), monkeypatch, loop, "run_update", 36)
    assert outcome(quick("killed").out) == outcome(folder)


def test_a_schedule_may_prune_beside_frozen_heads_and_undo_either(settings):
    steps = Listed(((3, Freeze(count=2)), (6, Prune(count=2)), (6, Undo(event=1)), (9, Undo(event=2))))
    config = settings(freeze=FreezeConfig(rate=0.5), schedule=steps, keep=0)
    pretrain(config)
    assert [event[1] for event in told(config.out)] == ["freeze", "prune", "undo", "undo"]
    first, second, *_ = read_events(config.out)
    assert not set(map(tuple, first.heads)) & set(map(tuple, second.heads))
    after = adapter_for(load_model(f"{config.out}/checkpoints/step-9"))
    assert (after.heads("frozen").to_list(), after.heads("pruned").to_list()) == ([], second.heads)
    assert adapter_for(load_model(f"{config.out}/checkpoints/step-12")).heads("frozen", "pruned").to_list() == []


def test_pruned_from_initialisation_a_run_trains_like_a_model_built_smaller(settings):
    """The layout of another arm at update 0; the smaller model is written anew and trained in float64."""
    heads = ((0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (1, 3))
    freeze = FreezeConfig(operation="prune", heads=heads)
    config = settings(freeze=freeze, schedule=OneTime(at=0), updates=6, save_every=0, eval_every=0, keep=0)
    pretrain(config)
    start = open_checkpoint(f"{config.out}/checkpoints/step-0").model()
    small = Small([2, 0]).double()
    small.embed = torch.nn.Embedding.from_pretrained(start.embed.weight.detach().double(), freeze=False)
    small.weights["norm"].data.copy_(start.norm.weight)
    names = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o"}
    for name, tensor in start.named_parameters():
        if (parts := name.split("."))[0] == "blocks":
            kept = rows_of([head for head in range(4) if (int(parts[1]), head) not in heads])
            if (role := names.get(parts[-2])) is not None:
                tensor = tensor[:, kept] if role == "o" else tensor[kept]
            small.weights[f"{parts[1]}_{role or parts[-2]}"].data.copy_(tensor)
    matrices, vectors = ([one for one in small.parameters() if (one.dim() > 1) == two] for two in (True, False))
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    trainer = torch.optim.AdamW(groups, betas=config.betas)
    angle = torch.arange(32.0).double()[:, None] * 10_000.0 ** (-torch.arange(0, 8, 2).double() / 8)
    batches = TASKS["text"](config, length=32).training(0, torch.device("cpu"))
    for line in read_lines(Path(config.out) / "metrics.jsonl"):
        losses = []
        for _ in range(config.accumulation):
            inputs, targets = batches.take()
            logits = small(inputs, (angle.cos(), angle.sin()))
            losses.append(F.cross_entropy(logits.flatten(0, 1), targets.flatten()))
        (sum(losses) / len(losses)).backward()
        norm = torch.nn.utils.clip_grad_norm_(small.parameters(), config.clip)
        for group in trainer.param_groups:
            group["lr"] = line["lr"]
        trainer.step()
        trainer.zero_grad()
        assert line["loss"] == pytest.approx(float(sum(losses).detach()) / len(losses), rel=2e-6), line["update"]
        assert line["grad_norm"] == pytest.approx(float(norm), rel=2e-5)


@pytest.mark.parametrize(
    ("freeze", "schedule", "message"),
    [
        ({"rate": 1.0}, OneTime(), "pruning must leave the model a head, got 8 of 8"),
        ({"rate": 0.75}, ValidationBudget(), "ask for 6 of 8 heads; .* freezes at most 4"),
        ({"heads": ((0, 4),)}, OneTime(), "heads must exist"),
        ({"rate": 0.5, "max_per_layer": 1, "strict": True}, OneTime(), "4 heads are to be pruned, and .* leave 2: ask"),
        ({"rate": 0.5, "only": ((0, 0),), "exclude": ((0, 0),)}, OneTime(), "4 heads are to be pruned, and .* leave 0"),
    ],
)
def test_settings_that_cannot_work_are_told_before_training(settings, freeze, schedule, message):
    config = settings(freeze=FreezeConfig(operation="prune", **freeze), schedule=schedule)
    with pytest.raises(InputError, match=message):
        pretrain(config)
    assert not Path(config.out).exists()


def test_a_layer_that_lost_all_its_heads_resumes_bit_for_bit(settings, outcome, monkeypatch):
    """Its weights without elements take no steps, and are recorded with as many as the others all the same."""
    freeze = FreezeConfig(operation="prune", heads=[(1, head) for head in range(4)])
    options = {"freeze": freeze, "schedule": OneTime(at=0), "updates": 6, "save_every": 2, "eval_every": 0}
    whole, stopped = settings("whole", **options), settings("stopped", **options)
    pretrain(whole)
    killed_and_resumed(stopped, monkeypatch, loop, "run_update", 4)
    assert outcome(stopped.out) == outcome(whole.out)
    steps = load_file(Path(whole.out, "checkpoints", "step-6", "optimizer.safetensors"))
    assert {float(count) for name, count in steps.items() if name.endswith(".step")} == {6.0}


def test_heads_pruned_by_a_parent_are_not_pruned_again(settings, finished):
    folder = finished(settings(freeze=PRUNE, keep=0), "pruned")
    gone = tuple(map(tuple, read_events(folder)[0].heads))
    arm = continue_from(
        folder / "checkpoints" / "step-9", out=settings().out, freeze=FreezeConfig(operation="prune", heads=gone)
    )
    with pytest.raises(InputError, match="are frozen or pruned already"):
        pretrain(arm)
    with pytest.raises(InputError, match="must leave the model a head"):
        pretrain(replace(arm, freeze=FreezeConfig(operation="prune", count=4)))
