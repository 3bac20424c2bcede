import random
import shutil
import time
from pathlib import Path

import pytest
import torch

import saf.train.events as events
import saf.train.loop as loop
import saf.train.observer
import saf.train.run
import saf.train.start as start
from saf.errors import CheckpointError, InputError, SafWarning
from saf.freeze_config import FreezeConfig
from saf.records.files import LineLog, read_json, read_lines
from saf.records.folders import lock_folder
from saf.records.run import RecordedRun
from saf.schedules import Gradual, OneTime
from saf.train import TrainConfig, continue_from, latest, pretrain
from saf.train.checkpoint import save_checkpoint
from tests.train.group import begun
from tests.train.killed import Killed, die_at


@pytest.fixture(scope="module")
def uninterrupted(data, tmp_path_factory):
    """Return a function that gives the folder of a finished run of settings, trained once."""
    done = {}

    def run(config, key):
        if key not in done:
            config.out = str(tmp_path_factory.mktemp("uninterrupted") / "run")
            pretrain(config)
            done[key] = config.out
        return done[key]

    return run


@pytest.mark.parametrize("sampler", ["shuffled", "random"])
@pytest.mark.parametrize("call", [2, 5, 12])
def test_resumed_is_uninterrupted_bit_for_bit(settings, uninterrupted, outcome, monkeypatch, sampler, call):
    expected = outcome(uninterrupted(settings(sampler=sampler), sampler))
    config = settings(sampler=sampler)
    with monkeypatch.context() as patch:
        die_at(patch, loop, "run_update", call)
        with pytest.raises(Killed):
            pretrain(config)
    pretrain(config, resume=True)
    assert outcome(config.out) == expected


def test_a_run_that_froze_exponential_patterns_resumes_bit_for_bit(settings, outcome, monkeypatch):
    freeze = FreezeConfig(rate=0.5, storage="exponential", max_fit_kl=9)
    changes = {"length": 160, "accumulation": 1, "updates": 6, "freeze": freeze, "schedule": OneTime(at=0.5)}
    whole, config = settings("whole", **changes), settings("killed", **changes)
    pretrain(whole)
    [event] = read_lines(Path(whole.out) / "events.jsonl")
    assert {fit["kind"] for fit in event["exponential"]} == {"exponential"}
    with monkeypatch.context() as patch:
        die_at(patch, loop, "run_update", 5)
        with pytest.raises(Killed):
            pretrain(config)
    pretrain(config, resume=True)
    assert outcome(config.out) == outcome(whole.out)


def test_files_whose_writing_was_killed_do_not_stay_in_the_folder(settings, monkeypatch):
    config = settings(updates=4)
    with monkeypatch.context() as patch:
        die_at(patch, loop, "run_update", 3)
        with pytest.raises(Killed):
            pretrain(config)
    folder = Path(config.out)
    left = [folder / f".{name}.4711.tmp" for name in ("config.json", "metrics.jsonl", "event-1.safetensors")]
    of_another = folder / ".report.html.4712.tmp"  # which may be about to be renamed
    for path in (*left, of_another):
        path.write_bytes(b"half")
    pretrain(config, resume=True)
    assert list(folder.glob(".*.tmp")) == [of_another]


def test_random_states_are_put_back(settings, monkeypatch):
    config = settings()
    torch.rand(3)
    expected = torch.get_rng_state(), random.getstate()
    with monkeypatch.context() as patch:
        die_at(patch, loop, "run_update", 5)
        with pytest.raises(Killed):
            pretrain(config)
    torch.rand(7)
    random.random()
    pretrain(config, resume=True)
    assert torch.equal(torch.get_rng_state(), expected[0])
    assert random.getstate() == expected[1]


@pytest.mark.parametrize(
    ("module", "name", "call"),
    [
        (loop, "run_update", 5),
        (events, "freeze_", 1),
        (loop, "run_update", 7),
        (loop, "run_update", 11),
        (loop, "finish", 1),
    ],
    ids=["before", "during", "right-after", "later", "evaluation"],
)
def test_across_a_freezing_event(settings, uninterrupted, outcome, monkeypatch, module, name, call):
    freeze = FreezeConfig(rate=0.25, max_fit_kl=10.0)
    expected = outcome(uninterrupted(settings(freeze=freeze), "frozen"))
    config = settings(freeze=freeze)
    with monkeypatch.context() as patch:
        die_at(patch, module, name, call)
        with pytest.raises(Killed):
            pretrain(config)
    result = pretrain(config, resume=True)
    assert outcome(config.out) == expected
    assert result["intervention"]["update"] == 6
    assert [line["when"] for line in expected["evaluations"]] == [
        "periodic",
        "before_freeze",
        "after_freeze",
        "periodic",
        "periodic",
    ]


@pytest.mark.parametrize("call", [1, 3])
def test_killed_while_saving(settings, uninterrupted, outcome, monkeypatch, call):
    import saf.train.checkpoint as checkpoint

    expected = outcome(uninterrupted(settings(), "shuffled"))
    config = settings()
    with monkeypatch.context() as patch:
        die_at(patch, checkpoint, "write_manifest", call)
        with pytest.raises(Killed):
            pretrain(config)
    pretrain(config, resume=True)
    assert outcome(config.out) == expected


def resumed(config: TrainConfig) -> None:
    """Train from the newest checkpoint, or from the start; for a process of its own."""
    torch.set_num_threads(1)
    pretrain(config, resume=(Path(config.out) / "config.json").exists())


@pytest.mark.slow
def test_killed_process_resumes(settings, uninterrupted, outcome):
    """SIGKILL at moments nobody chose, until the run is through."""
    freeze = FreezeConfig(rate=0.25, max_fit_kl=10.0)
    expected = outcome(uninterrupted(settings(freeze=freeze), "frozen"))
    config = settings(freeze=freeze, keep=0)
    rng = random.Random(0)
    for _ in range(2):
        process = begun(resumed, config)
        while process.is_alive() and not read_lines(metrics_of(config)):
            time.sleep(0.005)
        time.sleep(rng.uniform(0.0, 0.15))
        process.kill()
        process.join()
    process = begun(resumed, config)
    process.join()
    assert process.exitcode == 0
    assert outcome(config.out) == expected


def metrics_of(config) -> Path:
    return Path(config.out) / "metrics.jsonl"


def test_resuming_a_finished_run_repeats_its_result(settings, outcome):
    config = settings()
    first = pretrain(config)
    before = outcome(config.out)
    again = pretrain(config, resume=True)
    assert again["report_loss"] == first["report_loss"]
    assert outcome(config.out) == before


def test_a_half_written_line_is_dropped(settings, uninterrupted, outcome, monkeypatch, tmp_path):
    expected = outcome(uninterrupted(settings(), "shuffled"))
    config = settings()
    with monkeypatch.context() as patch:
        die_at(patch, loop, "run_update", 9)
        with pytest.raises(Killed):
            pretrain(config)
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"update": 9, "tok')
    pretrain(config, resume=True)
    assert outcome(config.out) == expected


def test_logs_are_on_the_disk_before_the_checkpoint_and_what_is_lost_is_named(settings, monkeypatch):
    config, synced = settings(freeze=FreezeConfig(rate=0.25, max_fit_kl=10.0)), []
    with monkeypatch.context() as patch:
        patch.setattr(
            saf.train.observer, "LineLog", type("Log", (LineLog,), {"sync": lambda log: synced.append(log.path)})
        )
        patch.setattr(
            saf.train.run, "save_checkpoint", lambda *a, **k: synced.append("saved") or save_checkpoint(*a, **k)
        )
        die_at(patch, loop, "run_update", 8)
        with pytest.raises(Killed):
            pretrain(config)
    folder = Path(config.out)
    assert synced[:3] == [folder / "metrics.jsonl", folder / "evaluations.jsonl", "saved"]
    assert len(synced) == 6
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:1] + lines[3:4] + lines[5:]))
    with pytest.warns(SafWarning, match=r"lost a part of its record: .* no line of updates 2 to 3, 5$"):
        result = pretrain(config, resume=True)
    assert result["lacks"] == ["metrics: metrics.jsonl has no line of updates 2 to 3, 5"]
    (folder / "events.jsonl").unlink()
    with pytest.warns(SafWarning) as told:
        result = pretrain(config, resume=True)
    assert any("has lost events.jsonl: heads are frozen" in str(warning.message) for warning in told)
    assert result["arm"] == "frozen"
    assert "events.jsonl is missing" in RecordedRun.open(folder).lacks[-1]


def test_an_event_that_its_file_lost_is_told(settings):
    config = settings(freeze=FreezeConfig(rate=0.5, max_fit_kl=10.0), schedule=Gradual(begin=0.25, end=0.75, groups=2))
    pretrain(config)
    events = Path(config.out, "events.jsonl")
    lines = events.read_text().splitlines(keepends=True)
    assert len(lines) == 2
    events.write_text(lines[0])
    with pytest.warns(SafWarning, match=r"events.jsonl has lost 1 of the 2 lines beside which .*step-12 was written"):
        pretrain(config, resume=True)


def test_refuses_a_second_run_in_the_folder(settings):
    config = settings(updates=2)
    pretrain(config)
    with pytest.raises(InputError, match="holds a run already"):
        pretrain(config)


def test_the_folder_is_in_use_until_the_result_is_written(settings, monkeypatch):
    config, told = settings(updates=2), []

    def another(run, real=loop.finish):
        with pytest.raises(InputError, match="another process trains in") as refused:
            lock_folder(run.folder)
        told.append(refused)
        return real(run)

    monkeypatch.setattr(loop, "finish", another)
    pretrain(config)
    assert told
    lock_folder(Path(config.out)).close()


def test_refuses_a_folder_in_use(settings):
    config = settings(updates=2)
    pretrain(config)
    with lock_folder(Path(config.out)), pytest.raises(InputError, match="another process trains in"):
        pretrain(config, resume=True)
    pretrain(config, resume=True)


def test_refuses_a_folder_that_another_process_took_while_this_one_was_set_up(settings, outcome, monkeypatch):
    """Both found it empty; the other one was faster, and has even ended when this one gets the lock."""
    config, real = settings(updates=2), start.check_freeze

    def slow(*arguments):
        monkeypatch.setattr(start, "check_freeze", real)
        pretrain(settings(updates=2, seed=5))
        slow.found = outcome(config.out)
        return real(*arguments)

    monkeypatch.setattr(start, "check_freeze", slow)
    with pytest.raises(InputError, match="holds a run by now, which another process began meanwhile"):
        pretrain(config)
    assert outcome(config.out) == slow.found
    assert read_json(Path(config.out, "config.json"))["settings"]["seed"] == 5


def test_refuses_other_settings(settings):
    pretrain(settings(updates=2))
    with pytest.raises(InputError, match=r"peak_lr: the run has 0.003, got 0.001.*this one as its parent"):
        pretrain(settings(updates=2, peak_lr=1e-3), resume=True)
    pretrain(settings(updates=2, save_every=1, quiet=True), resume=True)


def test_of_freezing_and_the_shape_only_what_differs_is_told(settings):
    pretrain(settings(updates=2, freeze=FreezeConfig(rate=0.25, max_fit_kl=9.0)))
    other = {"num_layers": 2, "num_heads": 2, "hidden_size": 32}
    changed = settings(updates=2, freeze=FreezeConfig(rate=0.25, max_fit_kl=8.0, seed=1), model_overrides=other)
    with pytest.raises(InputError) as caught:
        pretrain(changed, resume=True)
    differing = str(caught.value).split("(")[1].split(")")[0].split("; ")
    assert differing == [
        "freeze.max_fit_kl: the run has 9.0, got 8.0",
        "freeze.seed: the run has 0, got 1",
        "model_overrides.num_heads: the run has 4, got 2",
    ]


def test_refuses_a_damaged_checkpoint_and_goes_on_from_the_previous_one(settings, uninterrupted, outcome, monkeypatch):
    expected = outcome(uninterrupted(settings(), "shuffled"))
    config = settings()
    with monkeypatch.context() as patch:
        die_at(patch, loop, "run_update", 11)
        with pytest.raises(Killed):
            pretrain(config)
    damaged = latest(f"{config.out}/checkpoints")
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(
        CheckpointError, match=rf"{weights} is damaged.*step-6 is whole. To go on from it, move step-9 away"
    ):
        pretrain(config, resume=True)
    shutil.rmtree(damaged)
    pretrain(config, resume=True)
    assert outcome(config.out) == expected


def test_a_checkpoint_that_lost_its_manifest_is_refused_before_a_run_could_end_without_one(settings, outcome):
    config = settings(keep=0)
    pretrain(config)
    expected, last = outcome(config.out), latest(f"{config.out}/checkpoints")
    (last / "manifest.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"no manifest.json.*step-9 is whole. To go on from it, move step-12 away"
    ):
        pretrain(config, resume=True)
    shutil.rmtree(last)
    assert pretrain(config, resume=True)["checkpoint"] == str(last)
    assert outcome(config.out) == expected


def test_refuses_other_data(settings, data, tmp_path):
    from saf.data import prepare

    config = settings(updates=2)
    pretrain(config)
    prepare(
        [str(data.parent / "text")],
        tmp_path / "other",
        vocab_size=300,
        heldout_fraction=0.3,
        workers=1,
        progress=False,
        seed=5,
    )
    child = continue_from(f"{config.out}/checkpoints/step-1", out=tmp_path / "child", data=str(tmp_path / "other"))
    with pytest.raises(CheckpointError, match="fingerprint"):
        pretrain(child)


def test_resume_without_a_checkpoint_starts_over(settings, uninterrupted, outcome, monkeypatch):
    expected = outcome(uninterrupted(settings(), "shuffled"))
    config = settings()
    with monkeypatch.context() as patch:
        die_at(patch, loop, "run_update", 2)
        with pytest.raises(Killed):
            pretrain(config)
    assert latest(f"{config.out}/checkpoints") is None
    assert len(read_lines(metrics_of(config))) == 1
    pretrain(config, resume=True)
    assert outcome(config.out) == expected
    assert read_json(metrics_of(config).with_name("config.json"))["parent"] is None


def lowest_variance(statistics):
    return statistics.variance


def test_resuming_with_a_score_of_ones_own(settings, outcome, monkeypatch):
    freeze = FreezeConfig(rate=0.25, score=lowest_variance, max_fit_kl=10.0)
    config, whole = settings(freeze=freeze), settings("whole", freeze=freeze)
    pretrain(whole)
    with monkeypatch.context() as patch:
        die_at(patch, loop, "run_update", 8)
        with pytest.raises(Killed):
            pretrain(config)
    pretrain(config, resume=True)
    assert outcome(config.out) == outcome(whole.out)
    pretrain(continue_from(f"{config.out}/checkpoints/step-6", out=settings("child").out))
