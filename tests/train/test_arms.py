import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from saf.cli.training import result_table
from saf.errors import DataError, InputError, UnsupportedError
from saf.evaluate.compare import differences
from saf.evaluate.perplexity import read_evaluation
from saf.freeze_config import FreezeConfig
from saf.records.events import read_events
from saf.records.files import read_json, read_lines
from saf.records.run import RecordedRun
from saf.schedules import OneTime
from saf.train import continue_from, load_model, open_checkpoint, pretrain

FREEZE = FreezeConfig(rate=0.25, max_fit_kl=10.0)
RESULT_KEYS = {
    "schema", "kind", "settings", "arm", "updates", "tokens", "train_loss", "report_loss", "report_perplexity",
    "unigram_entropy", "update_seconds", "peak_memory_bytes", "time", "lacks", "intervention", "provenance",
}  # fmt: skip
PROVENANCE_KEYS = {
    "source_hash", "checkpoints", "data", "config_hash", "patterns_hash", "heads", "pruned", "seed", "files",
    "versions", "device", "commit", "command", "date",
}  # fmt: skip


def test_learns(settings):
    result = pretrain(settings(updates=150, eval_every=0, save_every=0))
    assert result["report_loss"] < result["unigram_entropy"] - 0.2


def test_frozen_arm_is_the_same_as_one_run_that_freezes(settings, outcome):
    """Same weights, moments, data order and learning rates, whether or not the arm is a run of its own."""
    pretrain(settings("ordinary"))
    parent = f"{settings('ordinary').out}/checkpoints/step-6"
    frozen = continue_from(parent, out=settings("frozen").out, freeze=FREEZE)
    result = pretrain(frozen)
    pretrain(settings("single", freeze=FREEZE))
    arm, single = outcome(frozen.out), outcome(settings("single").out)
    for name in ("model.safetensors", "optimizer.safetensors", "saf.safetensors", "saf.json", "report_loss"):
        assert arm[name] == single[name], name
    assert arm["metrics"] == single["metrics"][6:]
    assert result["arm"] == "frozen"
    assert result["provenance"]["checkpoints"]["parent"] == open_checkpoint(parent).hash
    assert read_json(path(frozen, "config.json"))["parent"]["path"] == parent
    assert outcome(settings("ordinary").out)["model.safetensors"] != arm["model.safetensors"]


def test_the_rate_rises_again_after_an_event_in_an_arm_and_in_one_run_that_freezes(settings, outcome):
    freeze = FreezeConfig(rate=0.25, max_fit_kl=10.0)
    pretrain(settings("ordinary"))
    arm = continue_from(
        f"{settings('ordinary').out}/checkpoints/step-6", out=settings("arm").out, freeze=freeze, rewarm=3
    )
    pretrain(arm)
    pretrain(settings("single", freeze=freeze, rewarm=0.25))  # of 12 updates
    ordinary, frozen, single = (outcome(settings(name).out) for name in ("ordinary", "arm", "single"))
    assert frozen["metrics"] == single["metrics"][6:]
    assert frozen["model.safetensors"] == single["model.safetensors"]
    shares = [own["lr"] / usual["lr"] for own, usual in zip(single["metrics"], ordinary["metrics"], strict=True)]
    assert shares == pytest.approx([1.0] * 6 + [1 / 3, 2 / 3] + [1.0] * 4)
    again = continue_from(f"{arm.out}/checkpoints/step-9", out=settings("again").out)
    assert again.rewarm == 0


def path(config, name: str) -> Path:
    return Path(config.out) / name


def test_an_arm_that_freezes_nothing_is_the_ordinary_run(settings, outcome):
    pretrain(settings("ordinary"))
    zero = pretrain(settings("zero", freeze=FreezeConfig(rate=0.0)))
    ordinary, arm = outcome(settings("ordinary").out), outcome(settings("zero").out)
    for name in ("model.safetensors", "optimizer.safetensors", "metrics", "report_loss"):
        assert arm[name] == ordinary[name], name
    assert zero["arm"] == "ordinary"
    rows = {row[0]: str(row[1]) for row in map(tuple, result_table(zero).rows)}
    assert rows["heads frozen or pruned"] == "none by the event after update 6"
    assert zero["intervention"]["heads"] == []
    assert zero["intervention"]["loss_before"] == zero["intervention"]["loss_after"]


def test_parent_of_an_ordinary_arm(settings, outcome):
    pretrain(settings("whole"))
    child = continue_from(f"{settings('whole').out}/checkpoints/step-6", out=settings("child").out)
    pretrain(child)
    whole, arm = outcome(settings("whole").out), outcome(child.out)
    assert arm["model.safetensors"] == whole["model.safetensors"]
    assert arm["optimizer.safetensors"] == whole["optimizer.safetensors"]


def test_run_folder(settings):
    config = settings(freeze=FREEZE, tensorboard=True)
    result = pretrain(config)
    assert result.keys() >= RESULT_KEYS
    assert result["provenance"].keys() == PROVENANCE_KEYS
    assert read_json(path(config, "result.json")) == json.loads(json.dumps(result))
    assert result["tokens"] == 12 * 4 * 2 * 32
    assert result["provenance"]["heads"] == result["intervention"]["heads"] == read_events(config.out)[0].heads
    assert len(result["provenance"]["heads"]) == 2
    written = read_json(path(config, "config.json"))
    assert written["schema"] == "saf.run/1"
    assert written["freeze"]["rate"] == 0.25
    assert written["freeze"]["freeze_at"] == 6
    assert written["train"]["length"] == 32
    assert "freeze" not in written["train"]
    assert written["data"]["folder"] == config.data
    (event,) = read_events(config.out)
    assert (event.number, event.kind, event.update, event.values["num_sequences"]) == (1, "freeze", 6, 4)
    assert event.values["reason"] == "one_time: update 6 is done"
    assert event.values["loss_before"] == result["intervention"]["loss_before"]
    assert event.tensors()["alpha"].shape == (2, 32)
    metrics = read_lines(path(config, "metrics.jsonl"))
    assert [line["update"] for line in metrics] == list(range(1, 13))
    assert metrics[-1].keys() == {"update", "tokens", "loss", "lr", "grad_norm", "update_seconds"}
    assert metrics[2]["tokens"] == 3 * 4 * 2 * 32
    assert read_evaluation(config.out)[0]["loss"] == result["report_loss"]
    assert list(path(config, "tensorboard").glob("events.*"))
    timing = result["update_seconds"]
    assert (timing["first_update"], timing["last_update"]) == (8, 12)
    assert timing["p20"] <= timing["median"] <= timing["p80"]


def test_checkpoint_before_the_event_is_kept(settings):
    config = settings(freeze=FREEZE, save_every=1, keep=2)
    pretrain(config)
    names = sorted(entry.name for entry in path(config, "checkpoints").iterdir())
    assert names == ["step-11", "step-12", "step-6"]
    assert load_model(path(config, "checkpoints") / "step-6").blocks[0].attention.layout.num_frozen == 0
    final = load_model(path(config, "checkpoints") / "step-12")
    assert sum(block.attention.layout.num_frozen for block in final.blocks) == 2


def test_ordinary_arm_saves_the_checkpoint_to_branch_from(settings):
    config = settings(save_every=0, schedule=OneTime(at=0.25))
    pretrain(config)
    assert sorted(entry.name for entry in path(config, "checkpoints").iterdir()) == ["step-12", "step-3"]


def test_an_ordinary_arm_to_branch_from_before_the_first_update_saves_itself_there(settings, outcome):
    whole = settings("whole", save_at=(0.0,), updates=6)
    pretrain(whole)
    first = Path(whole.out) / "checkpoints" / "step-0"
    branch = continue_from(first, out=settings("branch").out)
    pretrain(branch)
    assert outcome(branch.out) == outcome(whole.out)
    assert not (Path(branch.out) / "checkpoints" / "step-0").exists()
    early = settings("early", schedule=OneTime(at=0), updates=1)
    saved = pretrain(early)["provenance"]["checkpoints"]["branch"]
    assert saved == read_json(Path(early.out) / "checkpoints" / "step-0" / "manifest.json")["hash"]


def test_freezing_after_the_last_update(settings, outcome, capsys):
    config = settings(freeze=FREEZE, schedule=OneTime(at=1.0), quiet=False)
    result = pretrain(config)
    said = capsys.readouterr()
    assert "frozen after the last update: the run ends with them" in " ".join((said.out + said.err).split())
    assert result["intervention"]["update"] == 12
    assert result["checkpoint"].endswith("step-12-frozen")
    first = outcome(config.out)
    pretrain(config, resume=True)
    assert outcome(config.out) == first


def test_freezing_before_the_first_update(settings):
    result = pretrain(settings(freeze=FREEZE, schedule=OneTime(at=0)))
    assert result["intervention"]["update"] == 0
    assert len(result["provenance"]["heads"]) == 2


def test_later_continuation_with_rates_of_its_own(settings):
    pretrain(settings("first"))
    child = continue_from(
        f"{settings('first').out}/checkpoints/step-12",
        out=settings("later").out,
        updates=18,
        lr_start=12,
        peak_lr=3e-4,
        warmup=0,
    )
    pretrain(child)
    rates = [line["lr"] for line in read_lines(path(child, "metrics.jsonl"))]
    assert len(rates) == 6
    assert rates[-1] == pytest.approx(3e-5)
    assert rates == sorted(rates, reverse=True)
    assert rates[0] < 3e-4


def test_accumulation_adds_up_to_the_larger_batch(settings):
    """Averaged micro-batches give the loss and gradient norm of one batch."""
    pretrain(settings("one", batch_size=8, accumulation=1, updates=2, eval_every=0))
    pretrain(settings("four", batch_size=2, accumulation=4, updates=2, eval_every=0))
    one, four = (read_lines(path(settings(name), "metrics.jsonl")) for name in ("one", "four"))
    for left, right in zip(one, four, strict=True):
        assert left["loss"] == pytest.approx(right["loss"], rel=1e-5)
        assert left["grad_norm"] == pytest.approx(right["grad_norm"], rel=1e-4)


def test_bf16_stays_close_to_fp32(settings):
    exact = pretrain(settings("fp32"))
    lowered = pretrain(settings("bf16", precision="bf16", freeze=FreezeConfig(rate=0.0)))
    assert lowered["report_loss"] != exact["report_loss"]
    assert lowered["report_loss"] == pytest.approx(exact["report_loss"], rel=0.01)
    dtypes = {tensor.dtype for tensor in load_model(lowered["checkpoint"]).state_dict().values()}
    assert dtypes == {torch.float32}


def test_seed_decides_weights_and_order(settings, outcome):
    pretrain(settings("a", updates=2))
    pretrain(settings("b", updates=2))
    pretrain(settings("c", updates=2, seed=7))
    a, b, c = (outcome(settings(name).out) for name in "abc")
    assert a["model.safetensors"] == b["model.safetensors"]
    assert a["model.safetensors"] != c["model.safetensors"]


def test_live_heads_run_on_the_kernel_asked_for_before_and_after_freezing(settings, monkeypatch):
    from saf.ops import attention, live

    seen = set()
    for module in (attention, live):
        monkeypatch.setattr(module, "check_kernel", seen.add)
    pretrain(settings(kernel="math", freeze=FreezeConfig(rate=0.25, max_fit_kl=9)))
    assert seen == {"math"}
    monkeypatch.undo()
    with pytest.raises(UnsupportedError, match="'cudnn' needs a CUDA device, got cpu"):
        pretrain(settings("other", kernel="cudnn"))
    assert not Path(settings("other").out).exists()


def test_global_generators_are_left_alone(settings):
    def state():
        return random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().tolist()

    before = state()
    pretrain(settings(freeze=FREEZE))
    assert state() == before


def test_refuses_unusable_parents(settings):
    config = settings()
    pretrain(config)
    parent = f"{config.out}/checkpoints/step-6"
    with pytest.raises(InputError, match="before the parent's 6"):
        continue_from(parent, out="x", freeze=FREEZE, schedule=OneTime(at=0.25))
    with pytest.raises(InputError, match=r"updates=5 are fewer than the 6 that the parent has done.*ask for more"):
        continue_from(parent, out="x", updates=5, freeze=FREEZE)
    for name, passed, later in (("save_at", (0.25,), (0.5, 0.75)), ("report_at", (3,), (6, 9))):
        with pytest.raises(InputError, match=rf"{name} asks for update 3, and this run goes on from its parent's 6"):
            continue_from(parent, out="x", **{name: passed})
        assert getattr(continue_from(parent, out="x", **{name: later}), name) == later
        assert getattr(continue_from(parent, out="x", fresh=True, **{name: passed}), name) == passed
    with pytest.raises(InputError, match="unknown settings"):
        continue_from(parent, out="x", warmpu=3)
    with pytest.raises(InputError, match="batch_size x accumulation must be"):
        pretrain(continue_from(parent, out=settings("other").out, batch_size=3))
    pretrain(continue_from(parent, out=settings("same").out, batch_size=8, accumulation=1))


def test_too_little_heldout_text_is_told_before_training(settings):
    config = settings(freeze=FREEZE, calibration_sequences=10_000)
    with pytest.raises(DataError, match="calibration needs 10000 windows"):
        pretrain(config)
    with pytest.raises(InputError, match=r"score 'variance' compares sequences.*got 1"):
        pretrain(settings(freeze=FREEZE, calibration_sequences=1))
    assert not path(config, "metrics.jsonl").exists()


def test_a_parent_that_has_done_every_update_is_refused(settings):
    pretrain(settings())
    late = continue_from(f"{settings().out}/checkpoints/step-12", out=settings("late").out)
    with pytest.raises(InputError, match="the parent has done 12 updates already, and updates=12"):
        pretrain(late)
    assert not Path(late.out).exists()


@pytest.mark.parametrize(
    ("freeze", "message"),
    [
        ({"backend": "nope"}, "unknown backend 'nope'"),
        ({"backend": "fused"}, "backend 'fused' cannot run"),
        ({"score": lambda statistics, *, weather: statistics.variance}, "needs weather, which a run cannot give"),
        ({"score": "qk_gradient"}, "averages? of Q/K gradients"),
    ],
    ids=["backend", "device", "score", "gradient"],
)
def test_freezing_that_cannot_work_is_told_before_training_and_leaves_nothing(settings, freeze, message):
    config = settings(freeze=FreezeConfig(rate=0.25, **freeze), schedule=OneTime(at=0 if "score" in freeze else 0.5))
    with pytest.raises((InputError, UnsupportedError), match=message):
        pretrain(config)
    assert not Path(config.out).exists()


def test_the_checkpoint_at_the_freezing_point_stays_known_once_it_is_gone(settings):
    config = settings()
    recorded = pretrain(config)["provenance"]["checkpoints"]["branch"]
    assert recorded == open_checkpoint(path(config, "checkpoints") / "step-6").hash
    arm = continue_from(path(config, "checkpoints") / "step-6", out=settings("arm").out, freeze=FREEZE)
    pretrain(arm)
    shutil.rmtree(path(config, "checkpoints"))
    assert differences(RecordedRun.open(config.out), RecordedRun.open(arm.out)) == []
