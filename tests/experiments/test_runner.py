"""The runner: what it makes once, resumes, names and leaves out."""

import json
import multiprocessing
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

import experiments
from experiments.__main__ import main
from experiments.arms import Arm, arms
from experiments.inputs import Inputs, smoke_inputs
from experiments.records import CHECKS
from experiments.run import config_of, execute, plan, train
from experiments.scales import scale_named
from saf.errors import InputError

SMOKE = scale_named("smoke")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Inputs:
    return smoke_inputs(tmp_path_factory.mktemp("inputs"), Inputs())


@pytest.fixture
def runs_of(monkeypatch):
    """Return a function that plans arms of one's own."""

    def planned(root: Path, *own: Arm) -> dict:
        arms.cache_clear()
        monkeypatch.setattr("experiments.arms.OWN_ARMS", own)
        return plan([(arm.name, 1337) for arm in own], SMOKE, root)

    yield planned
    arms.cache_clear()


def test_an_arm_of_two_recipes_is_run_once_and_a_second_command_makes_nothing(inputs, tmp_path):
    wanted = [("4k-mean-25", 1337), ("4k-mean-25-control", 1337), ("4k-mean-25", 1337)]
    runs = plan(wanted, SMOKE, tmp_path)
    assert list(runs) == [("4k-ordinary", 1337), ("4k-mean-25", 1337)]
    assert not execute(runs, inputs).failed
    result = tmp_path / "smoke/4k-mean-25/seed-1337/result.json"
    record, written = json.loads(result.read_text()), result.stat().st_mtime_ns
    assert record["experiment"].items() >= {"scale": "smoke", "arm": "4k-mean-25", "seed": 1337}.items()
    assert len(record["provenance"]["heads"]) == 4  # a quarter of 2 layers x 8 heads
    assert record["checks"] == CHECKS
    execute(plan(wanted, SMOKE, tmp_path), inputs)
    assert result.stat().st_mtime_ns == written


def test_a_branch_begins_with_its_parents_checkpoint_but_waits_for_the_run_whose_time_it_gets(tmp_path):
    frozen, timed = ("4k-mean-25", 1337), ("4k-exponential-50-clock", 1337)
    runs = plan([frozen, timed], scale_named("small-75M"), tmp_path)
    missing = runs.keys()
    assert not runs[frozen].can_begin(missing)
    for run in (runs[frozen], runs[timed]):
        (run.needs["parent"].folder / "checkpoints" / f"step-{run.step}").mkdir(parents=True, exist_ok=True)
    assert runs[frozen].can_begin(missing)
    assert not runs[timed].can_begin(missing)
    assert runs[timed].can_begin({timed})


def test_a_run_that_fails_is_named_what_needs_it_is_left_out_and_the_others_go_on(inputs, tmp_path, runs_of):
    wrong = Arm(name="wrong", settings={"peak_lr": -1.0})
    runs = runs_of(tmp_path, wrong, Arm(name="child", parent="wrong"), Arm(name="good"))
    outcome = execute(runs, inputs)
    assert outcome.failed.keys() == {"wrong (seed 1337)", "child (seed 1337)"}
    assert "peak_lr" in outcome.failed["wrong (seed 1337)"]
    assert "needs" in outcome.failed["child (seed 1337)"]
    assert runs["good", 1337].record() is not None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peek_lr": 1.0}, "did you mean 'peak_lr'"),
        ({"freeze": {"rats": 0.3}}, "did you mean 'rate'"),
        ({"schedule": {"name": "gradul"}}, "gradual"),
    ],
)
def test_settings_that_no_run_takes_are_refused_before_the_parent_trains(settings, message, tmp_path, runs_of):
    with pytest.raises(InputError, match=message):
        runs_of(tmp_path, Arm(name="wrong", parent="4k-ordinary", settings=settings))


def test_two_arms_of_one_name_are_refused_in_a_line(runs_of, tmp_path, capsys):
    with pytest.raises(InputError, match="two arms are called '4k-mean-25'"):
        runs_of(tmp_path, Arm(name="4k-mean-25"))
    assert main(["timing", "--dry-run"]) == 2
    assert "two arms are called" in capsys.readouterr().err


def test_a_run_of_other_settings_is_refused(inputs, tmp_path, runs_of):
    execute(runs_of(tmp_path, Arm(name="good")), inputs)
    runs = runs_of(tmp_path, Arm(name="good", settings={"peak_lr": 1e-3}))
    with pytest.raises(InputError, match="peak_lr"):
        execute(runs, inputs)


def test_a_killed_run_is_resumed_to_the_same_numbers(inputs, tmp_path, runs_of):
    (whole,) = runs_of(tmp_path / "whole", Arm(name="long", settings={"updates": 120, "save_every": 10})).values()
    train(whole, inputs)
    killed = replace(whole, root=tmp_path / "killed")
    process = multiprocessing.get_context("fork").Process(target=train, args=(killed, inputs))
    process.start()
    while not (killed.folder / "checkpoints/step-20").is_dir():
        assert process.is_alive()
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert killed.record() is None
    assert not execute({killed.key: killed}, inputs).failed
    assert killed.record()["report_loss"] == whole.record()["report_loss"]


@pytest.mark.slow
def test_jobs_run_in_processes_of_their_own_and_record_the_command_that_was_typed(inputs, tmp_path, monkeypatch):
    typed = ["timing", "--scale", "smoke", "--jobs", "2"]
    monkeypatch.setattr("sys.argv", [str(Path(experiments.__file__).with_name("__main__.py")), *typed])
    wanted = [("4k-mean-25", 1337), ("8k-ordinary", 1337)]
    assert not execute(plan(wanted, SMOKE, tmp_path), inputs, jobs=2).failed
    records = [run.record() for run in plan(wanted, SMOKE, tmp_path).values()]
    assert {each["provenance"]["command"] for each in records} == {f"python -m experiments {' '.join(typed)}"}


def test_the_measured_speed_less_the_charge_decides_the_updates_of_small_runs():
    run = plan([("4k-mean-25-time", 1337)], scale_named("small-75M"), Path())["4k-mean-25-time", 1337]
    committed = json.loads(Path("results/small-75M/4k-mean-25-time/seed-1337.json").read_text())
    charged = 1_144 * 28.3 / (187.65 * 60)
    assert committed["updates"] == 572 + int(1.0810533293437499 * (572 - charged))
    assert run.updates == 1_144
    assert run.step == 572


@pytest.mark.parametrize("name", ["paper", "small-75M", "smoke"])
def test_every_arm_has_settings_that_a_run_takes(name):
    """`plan` checks them; where no parent's checkpoint is needed, the whole configuration is built."""
    scale = scale_named(name)
    for run in plan([(arm, 1337) for arm in arms()], scale, Path()).values():
        if run.arm.parent is None and "heads" not in run.needs:
            config = config_of(run, Inputs(data=Path("text")))
            assert config.updates == run.updates
        if run.arm.task is None:
            tokens, memory = run.cost
            assert 0 <= tokens < 1e11  # none where heads are frozen after training
            assert 0 < memory < 1e11


@pytest.mark.parametrize(
    ("arm", "expected"),
    [
        ("4k-mean-25", {"sampler": "random", "batch_size": 2, "accumulation": 60, "report_tokens": 2_449_408}),
        ("16k-mean-50", {"sampler": "random", "batch_size": 1, "accumulation": 30, "calibration_sequences": 16}),
        ("4k-mean-25-control", {"sampler": "shuffled", "batch_size": 8, "calibration_source": "calibration"}),
        ("later-mean-25", {"sampler": "shuffled", "peak_lr": 6e-5, "lr_start": 5_000, "report_tokens": 4_997_120}),
        ("1b-mean-25", {"sampler": "shuffled", "calibration_source": "train", "report_tokens": 4_194_304}),
    ],
)
def test_the_paper_scale_has_the_papers_settings(arm, expected):
    run = plan([(arm, 1337)], scale_named("paper"), Path())[arm, 1337]
    assert expected.items() <= run.settings.items()
    assert run.changes["freeze"]["fitter"] == "adam"


@pytest.mark.parametrize(
    ("arm", "mean"), [("4k-gaussian-50", "4k-mean-50"), ("4k-structured-random-25-at-75", "4k-mean-25-at-75")]
)
def test_other_patterns_have_the_heads_of_the_mean(arm, mean):
    assert plan([(arm, 1337)], scale_named("paper"), Path())[arm, 1337].needs["heads"].arm.name == mean


def test_a_dry_run_lists_tokens_and_makes_nothing(tmp_path, capsys):
    words = ["contexts", "--scale", "paper", "--seeds", "1337", "--dry-run", "--out", str(tmp_path)]
    assert main(words) == 0
    lines = {line.split(" ")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "2,457,600,000" in lines["4k-ordinary"]  # 5,000 updates of 491,520 tokens
    assert "1,228,800,000" in lines["4k-mean-25"]
    assert main([*words, "--arms", "8k-mean-25", "4k-mean-25", "--tokens-per-second", "1e6"]) == 0
    *_, short, _, total = capsys.readouterr().out.splitlines()
    assert "at 4,096 tokens of context: 2 runs, 3,686,400,000 tokens, 1.0 hours" in short
    assert "in all: 4 runs, 7,372,800,000 tokens, 2.0 hours" in total
    assert main(["recall", "later_intervention", "--scale", "paper", "--dry-run", "--out", str(tmp_path)]) == 0
    listed = [line.partition(" ")[0] for line in capsys.readouterr().out.splitlines()]
    assert listed.count("recovery-mean-25") == 1  # its rows are of the first seed alone
    assert listed.count("recall-later-mean-25") == listed.count("later-pruned-25") == 3
    assert not list(tmp_path.iterdir())


def test_mistakes_are_one_line(tmp_path, capsys):
    assert main(["timming", "--out", str(tmp_path)]) == 2
    assert "did you mean 'timing'" in capsys.readouterr().err
    assert main(["timing", "--scale", "samll", "--out", str(tmp_path)]) == 2
    assert main(["timing", "--out", str(tmp_path)]) == 2
    assert "--data" in capsys.readouterr().err
    assert main(["pruning_costs", "--scale", "smoke", "--arms", "prefill, frozen, matched time"]) == 2
    assert "leaves out 'prefill, frozen, matched time'" in capsys.readouterr().err
