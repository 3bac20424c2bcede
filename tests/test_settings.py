"""Every field of every class of settings is described, in Python's help() and on the command line."""

import importlib
import inspect
import pydoc
from dataclasses import dataclass, fields
from typing import Annotated

import pytest
import tyro

from saf.bench.accuracy.errors import ErrorSettings
from saf.bench.freezing.settings import CalibrationSettings
from saf.bench.model.prefill import PrefillSettings
from saf.bench.model.update import UpdateSettings
from saf.bench.operator.case import OpSettings
from saf.cli import COMMANDS, GROUPS
from saf.cli.command import Command, all_flags, in_flags
from saf.data.config import PrepareConfig
from saf.freeze_checkpoint import CheckpointFreezing
from saf.freezing.config import FreezeConfig
from saf.schedules import SCHEDULES
from saf.settings import OneOf, documented, field_docs
from saf.train import TrainConfig


def commands() -> dict[str, type[Command]]:
    """Every command by its name."""
    found = {}
    for name in COMMANDS:
        module = importlib.import_module(f"saf.cli.{name}")
        if name in GROUPS:
            found |= {f"{name} {sub}": command for sub, command in module.COMMANDS.items()}
        else:
            found[name] = module.COMMAND
    return found


SETTINGS = [
    *(FreezeConfig, TrainConfig, PrepareConfig, CheckpointFreezing),
    *(OpSettings, PrefillSettings, UpdateSettings, ErrorSettings, CalibrationSettings),
    *SCHEDULES.values(),
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_help_shows_every_field_with_its_description(settings):
    shown = " ".join(pydoc.plain(pydoc.render_doc(settings)).replace("|", " ").split())
    described = field_docs(settings)
    for field in fields(settings):
        assert f"{field.name}: {described[field.name]}" in shown


@pytest.mark.parametrize(("name", "command"), commands().items(), ids=commands())
def test_every_field_has_a_flag_with_its_description_and_default(name, command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")  # in wider ones long help stands in two columns
    with pytest.raises(SystemExit) as stop:
        command.from_words(["--help"])
    assert stop.value.code == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert " ".join(inspect.cleandoc(command.__doc__).split("\n\n")[0].split()) in shown
    flags = list(all_flags(command))
    for flag in flags:
        assert flag.help, f"{name}: {flag.field.name} has no description below it"
        assert in_flags(flag.help, command) in shown
        assert f"--{flag.name} " in shown or f"--{flag.name}, " in shown or tyro.conf.Positional in flag.marks
    assert shown.count("(default: ") + shown.count("(required)") == len(flags)


def test_choices_are_those_of_the_registry_when_they_are_asked_for():
    registry = {"one": 1}
    mark = OneOf(registry, also=("auto",))
    registry["two"] = 2
    assert mark.choices == ("auto", "one", "two")
    assert repr(mark) == "one of auto, one, two"


@documented
@dataclass
class Few:
    """Hold few settings."""

    first: Annotated[str, OneOf(("a", "b"))] = "a"
    """Described over
    two lines."""
    second: int = 2


def test_descriptions_come_from_below_the_fields():
    assert field_docs(Few) == {"first": "Described over two lines."}
    assert Few.__doc__ == "Hold few settings.\n\nAttributes:\n    first: Described over two lines."
