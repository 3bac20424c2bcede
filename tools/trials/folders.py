"""The folders that the product reads, made small, and what is learnt by reading each: every kind, with its readers."""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import saf
from saf.data import PARTITIONS, TokenData, prepare
from saf.evaluate.compare import compare_runs
from saf.evaluate.perplexity import read_evaluation
from saf.experiments.planned_run import PlannedRun
from saf.experiments.store import Store
from saf.freeze_checkpoint import CheckpointFreezing, freeze_checkpoint
from saf.freezing.config import FreezeConfig
from saf.inspection import inspect
from saf.models import GPT
from saf.records.events import read_events
from saf.records.files import file_hash, read_json, read_lines, write_json, write_tensors
from saf.records.result import read_result
from saf.records.run import RecordedRun
from saf.report.collection import find
from saf.train import TrainConfig, continue_from, latest, pretrain
from saf.train import loop as training_loop
from saf.train.checkpoint import open_checkpoint

RESULTS = Path(__file__).resolve().parents[2] / "results"
WORDS = ["the", "of", "head", "freeze", "pattern", "window", "token", "loss", "update", "rate", "layer", "model"]
KEY = "0123456789abcdef"
COMMITTED = ("bench/memory-4k.json", "bench/prefill-1k.json", "124m-midpoint/partial-spearman.json")
SETTINGS = "settings.json"
"""In a world, what its stopped run was started with."""


@dataclass(frozen=True)
class Subject:
    """Say what kind of folder is damaged, and how what it tells is learnt."""

    name: str
    folder: str
    """Its name in a world."""
    read: Callable[[Path], Any]
    """Returns plain values and tensors."""
    alone: bool = False
    """Whether a file of it is told of by no other, so that a whole one from elsewhere is no damage."""
    by_pairs: bool = False
    """Whether files have no seal: of two that do not belong together a message names either."""

    def files(self, folder: Path) -> list[Path]:
        """Return which files are damaged, by their paths in the folder: of a run's checkpoints the newest one's."""
        newest = latest(folder / "checkpoints")
        found = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size]
        old = [path for path in found if newest and "checkpoints" in path.parts and path.parent != newest]
        return sorted(path.relative_to(folder) for path in set(found) - set(old))


def make_world(world: Path, seed: int) -> None:
    """Make a folder of each kind; worlds of different seeds share nothing but their shapes."""
    data = prepare_text(world, seed)
    config = TrainConfig(**run_settings(data, world / "ordinary", seed))
    pretrain(config)
    parent = world / "ordinary" / "checkpoints" / "step-4"
    _stopped(_frozen_arm(world))
    pretrain(continue_from(parent, out=world / "run", freeze=FreezeConfig(rate=0.25, max_fit_kl=10.0)))
    freeze_checkpoint(
        CheckpointFreezing(
            checkpoint=parent,
            config=FreezeConfig(rate=0.25, max_fit_kl=10.0),
            out=world / "checkpoint",
            sequences=4,
            device="cpu",
        )
    )
    model = _model(seed)
    saf.calibrate(model, _batches(seed), folder=world / "calibration")
    statistics = saf.calibrate(model, _batches(seed), collect=("mean",))
    (world / "statistics").mkdir()
    statistics.save(world / "statistics" / "statistics.safetensors")
    report = saf.freeze_(model, _batches(seed), FreezeConfig(rate=0.25, max_fit_kl=10.0))
    saf.save(model, world / "saved")
    _store(world)
    _earlier(world / "earlier", report, seed)
    (world / "results").mkdir()
    for name in COMMITTED:
        write_json(world / "results" / Path(name).name, read_json(RESULTS / name))
    write_json(world / SETTINGS, _frozen_arm(world).to_dict())


def _frozen_arm(world: Path) -> TrainConfig:
    parent = world / "ordinary" / "checkpoints" / "step-4"
    return continue_from(parent, out=world / "stopped", freeze=FreezeConfig(rate=0.25, max_fit_kl=10.0))


def prepare_text(world: Path, seed: int) -> Path:
    """Make a data folder of a few thousand words in a folder and return it."""
    draw = random.Random(seed)
    text = world / "text"
    text.mkdir(parents=True)
    for number in range(40):
        (text / f"{number}.txt").write_text(" ".join(draw.choice(WORDS) for _ in range(400)))
    (text / "picture.png").write_bytes(b"\x89PNG\0\0")
    prepare([str(text)], world / "data", vocab_size=280, heldout_fraction=0.3, workers=1, progress=False)
    return world / "data"


def run_settings(data: Path, out: Path, seed: int) -> dict[str, Any]:
    """Return the settings of a run of eight updates, well under a second."""
    return {
        "data": str(data),
        "out": str(out),
        "model_overrides": {"num_layers": 2, "num_heads": 2, "hidden_size": 16},
        "length": 16,
        "batch_size": 2,
        "updates": 8,
        "eval_every": 2,
        "eval_windows": 2,
        "save_every": 2,
        "keep": 0,
        "calibration_sequences": 2,
        "seed": seed,
        "tensorboard": False,
        "quiet": True,
        "device": "cpu",
    }


def _stopped(config: TrainConfig) -> None:
    """Leave a run that was killed in its seventh update."""
    real = training_loop.run_update

    def dying(run: Any) -> Any:
        if run.update == 6:
            raise KeyboardInterrupt
        return real(run)

    with mock.patch.object(training_loop, "run_update", dying):
        try:
            pretrain(config)
        except KeyboardInterrupt:
            return
    raise AssertionError("the run was to be killed")


def _model(seed: int) -> GPT:
    made = saf.GPT(saf.GPTConfig(vocab_size=16, num_layers=2, num_heads=2, hidden_size=8, max_length=12))
    made.reset_parameters(torch.Generator().manual_seed(seed))
    return made


def _batches(seed: int) -> list[Tensor]:
    return [torch.randint(0, 16, (4, 12), generator=torch.Generator().manual_seed(seed))]


def _store(world: Path) -> None:
    store = Store(world / "store").open(write=True)
    shutil.copytree(world / "run", store.run_folder(KEY))
    seed = read_json(world / "run" / "config.json")["train"]["seed"]
    key = f"{KEY[:-1]}{seed}"
    store.run_folder(KEY).rename(store.run_folder(key))
    planned = PlannedRun(
        key=key,
        flags={},
        settings={},
        parent=None,
        step=None,
        match=None,
        scale="smoke",
        seed=seed,
        vocabulary=280,
        tables=(("table", "arm"),),
    )
    store.collect(planned)
    shutil.rmtree(world / "store" / "runs")


def _earlier(folder: Path, report: Any, seed: int) -> None:
    """Write an event as the first version recorded it."""
    folder.mkdir()
    record = {**report.to_dict(), "update": 5 + seed}
    (folder / "freeze.json").write_text(json.dumps(record))
    sums = {
        "heads": report.heads.to_list(),
        "patterns_hash": file_hash(write_tensors(folder / "freeze.safetensors", report.tensors())),
    }
    (folder / "config.json").write_text(json.dumps({"freeze": {"rate": 0.25}}))
    (folder / "result.json").write_text(json.dumps({"schema": "saf.result/1", "arm": "frozen", "provenance": sums}))


def subjects(world: Path) -> list[Subject]:
    """Return every kind of folder; `world` is one whose other folders are whole."""

    def run(folder: Path) -> Any:
        found = RecordedRun.open(folder)
        compared = compare_runs(world / "ordinary", found, resamples=10, allow_differences=True)
        del compared["provenance"]
        record, losses = read_evaluation(folder)
        told = inspect(folder)
        lacks = [*told["lacks"], *(each["problem"] for each in told["checkpoints"] if each["problem"])]
        return {
            **vars(found),
            "checkpoints": told["checkpoints"],
            "tensors": found.freeze_tensors,
            "lacks": lacks,
            "compared": compared,
            "last": record,
            "losses": vars(losses),
            "clock": read_lines(folder / "clock.jsonl"),
        }

    return [
        Subject("data folder", "data", _read_data),
        Subject("checkpoint", "checkpoint", _read_checkpoint),
        Subject("run", "run", run),
        Subject("stopped run", "stopped", _resume),
        Subject("calibration", "calibration", lambda folder: vars(_calibrated(folder))),
        Subject("statistics", "statistics", lambda folder: vars(_statistics(folder)), alone=True),
        Subject("saved model", "saved", _read_saved),
        Subject("store of runs", "store", _read_store),
        Subject("event of an earlier version", "earlier", _read_event, by_pairs=True),
        Subject("benchmarks and analyses", "results", _read_results, alone=True),
    ]


def _read_data(folder: Path) -> Any:
    data = TokenData.open(folder)
    return {
        "index": data.index,
        "tokens": {name: torch.from_numpy(data.tokens(name)[:].copy()) for name in PARTITIONS},
        "digests": {name: torch.from_numpy(data.digests(name).copy()) for name in PARTITIONS},
        "encoded": data.tokenizer().encode("the head of the pattern"),
    }


def _read_checkpoint(folder: Path) -> Any:
    checkpoint = open_checkpoint(folder)
    model = checkpoint.model()
    optimizer = checkpoint.optimizer(model)
    events = read_events(folder)
    return {
        "state": checkpoint.state,
        "hash": checkpoint.hash,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "events": [{"values": event.values, "tensors": event.tensors()} for event in events],
        "inspected": inspect(folder),
    }


def _resume(folder: Path) -> Any:
    config = TrainConfig.from_dict(read_json(folder.parent / SETTINGS))
    result = pretrain(config, resume=True)
    final = latest(folder / "checkpoints")
    assert final is not None
    model = open_checkpoint(final).model()
    events = read_events(folder)
    # Of two ways to the same end the clock and the hashes that cover it differ.
    metrics = [{**line, "update_seconds": 0.0} for line in RecordedRun.open(folder).metrics]
    return {
        "model": model.state_dict(),
        "metrics": metrics,
        "evaluations": read_lines(folder / "evaluations.jsonl"),
        "events": [{**event.values, "seconds": None} for event in events],
        "tensors": [event.tensors() for event in events],
        "loss": result["report_loss"],
        "heads": result["provenance"]["heads"],
        "lacks": result["lacks"],
    }


def _calibrated(folder: Path) -> Any:
    return saf.calibrate(_model(0), _batches(0), folder=folder)


def _statistics(folder: Path) -> Any:
    return saf.AttentionStatistics.load(folder / "statistics.safetensors")


def _read_saved(folder: Path) -> Any:
    model: nn.Module = saf.load(folder)
    model.eval()
    with torch.no_grad():
        outputs = model(_batches(0)[0])
    return {"state": model.state_dict(), "config": asdict(model.config), "outputs": outputs, "told": inspect(folder)}


def _read_store(folder: Path) -> Any:
    store = Store(folder).open(write=False)
    return {"record": store.record(f"{KEY[:-1]}0"), "fingerprint": store.fingerprint()}


def _read_event(folder: Path) -> Any:
    found = RecordedRun.open(folder)
    events = [{"values": event.values, "tensors": event.tensors()} for event in found.events]
    lost = [words for event in found.events for words in event.lacks]
    return {"events": events, "lacks": [*found.lacks, *lost]}


def _read_results(folder: Path) -> Any:
    read = [read_result(folder / Path(name).name) for name in COMMITTED]
    _, files = find(folder)
    return {"read": read, "found": [dict(file.record) for file in files]}
