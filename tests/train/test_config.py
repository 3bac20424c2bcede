import json

import pytest

from saf.errors import InputError
from saf.freeze_config import FreezeConfig
from saf.schedules import OneTime
from saf.train import TrainConfig, pretrain


def test_round_trips_through_json():
    config = TrainConfig(
        data="d",
        out="o",
        warmup=5,
        betas=(0.8, 0.9),
        freeze=FreezeConfig(rate=0.5, exclude=((0, 1),)),
        schedule=OneTime(at=0.25),
        model_overrides={"num_layers": 2},
    )
    again = TrainConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert isinstance(again.warmup, int)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1; got 0"),
        ({"updates": 0}, "updates"),
        ({"peak_lr": 0.0}, "peak_lr"),
        ({"min_lr_ratio": 1.5}, "min_lr_ratio"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"clip": 0.0}, "clip"),
        ({"warmup": 1000}, "warmup"),
        ({"warmup": 1.0}, "warmup"),
        ({"rewarm": 1.0, "freeze": FreezeConfig()}, "rewarm must be updates or a share, fewer than all; got 1.0"),
        (
            {"rewarm": 1, "freeze": FreezeConfig(), "schedule": OneTime(at=1.0)},
            "rewarm must be 0 where nothing trains on behind the event; got 1",
        ),
        ({"rewarm": -1, "freeze": FreezeConfig()}, "rewarm must be updates or a share"),
        ({"rewarm": 10}, "rewarm must be 0 in a run without events; got 10"),
        ({"lr_start": 1000}, "lr_start must be below updates=1000"),
        ({"schedule": OneTime(at=1001)}, r"schedule's at must be .* \[0, 1000\]; got 1001"),
        ({"schedule": None, "freeze": FreezeConfig()}, "schedule must be a schedule when freezing"),
        ({"kernel": "fast"}, "kernel must be one of auto, .*, got 'fast'"),
        ({"kernel": "flash", "freeze": FreezeConfig(backend="fused")}, "kernel must be auto with backend='fused'"),
        ({"sampler": "sorted"}, "sampler must be one of"),
        ({"precision": "fp8"}, "precision must be one of"),
        ({"lr_by": "elapsed"}, "time_budget_seconds must be a positive number"),
        ({"time_budget_seconds": 5.0}, "time_budget_seconds must be .*None otherwise; got 5.0"),
        ({"seed": -1}, "seed"),
    ],
)
def test_names_what_cannot_be_used(changes, message):
    with pytest.raises(InputError, match=message):
        TrainConfig(data="d", out="o", **changes)


@pytest.mark.parametrize(
    ("moment", "updates", "expected"), [(0.5, 5000, 2500), (0.25, 10, 2), (1.0, 10, 10), (1, 10, 1), (None, 10, None)]
)
def test_freezing_moment_is_a_share_or_an_update(moment, updates, expected):
    schedule = None if moment is None else OneTime(at=moment)
    assert TrainConfig(data="d", out="o", updates=updates, schedule=schedule).freeze_update == expected


@pytest.mark.parametrize(("warmup", "expected"), [(500, 0.1), (0.1, 0.1), (0, 0.0)])
def test_warmup_is_a_share_or_updates(warmup, expected):
    assert TrainConfig(data="d", out="o", updates=5000, warmup=warmup).warmup_share == expected


def test_refuses_unknown_fields():
    with pytest.raises(InputError, match="warmpu"):
        TrainConfig.from_dict({"data": "d", "out": "o", "warmpu": 3})


def test_no_run_is_written_into_a_data_folder(settings, data):
    before = sorted(path.name for path in data.iterdir())
    for resume in (False, True):
        with pytest.raises(InputError, match=r"is a data folder \(index.json is there\); choose another for the run"):
            pretrain(settings(out=str(data)), resume=resume)
    assert sorted(path.name for path in data.iterdir()) == before
