"""What "auto" means of compilation, by device and by how often heads may change."""

import pytest
import torch

from saf.machine.execution import Execution
from saf.schedules import SCHEDULES


@pytest.mark.parametrize(
    ("compile", "several", "expected"),
    [
        ("auto", False, (True, False)),
        ("auto", True, (True, True)),
        ("on", True, (True, False)),
        ("layers", False, (True, True)),
        ("off", True, (False, False)),
    ],
)
def test_several_events_compile_by_layers_on_a_gpu_unless_told_otherwise(monkeypatch, compile, several, expected):
    on_cpu = Execution.of("cpu", compile=compile, several_events=several)
    assert (on_cpu.compile, on_cpu.by_layer) == ((False, False) if compile == "auto" else expected)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    made = Execution.of("cuda", compile=compile, several_events=several)
    assert (made.compile, made.by_layer) == expected


def test_schedules_say_whether_heads_change_more_than_once():
    assert {name: schedule.several_events for name, schedule in SCHEDULES.items()} == {
        "one_time": False, "gradual": True, "validation_budget": True, "train_loss": True,
    }  # fmt: skip
