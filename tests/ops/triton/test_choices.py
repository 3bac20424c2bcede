"""Kept choices: read by products of their shape alone, never half a file, damaged ones refused by name."""

import json
import re

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from saf.errors import InputError, UnsupportedError  # noqa: E402
from saf.ops.toeplitz import choices  # noqa: E402
from saf.ops.toeplitz.config import Config, choose_config  # noqa: E402
from saf.ops.toeplitz.tuning import tune  # noqa: E402

CUDA = torch.device("cuda", 0)
SHAPE = {"length": 4096, "batch": 8, "heads": 3, "dim": 64, "dtype": torch.bfloat16, "transpose": False}
SLOW = Config(block_n=64, num_stages=2)


@pytest.fixture
def file(tmp_path, monkeypatch):
    """An empty cache directory for a device that is not here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Test")
    choices.choices_of.cache_clear()
    yield choices.cache_file(CUDA)
    choices.choices_of.cache_clear()


def config_of(**changed):
    shape = SHAPE | changed
    return choices.config_for(**shape, tables="tiles", descriptors=True, device=CUDA)


def test_a_kept_choice_serves_its_shape_alone(file):
    rule = choose_config(length=4096, columns=512, heads=3, dtype=torch.bfloat16, tables="tiles", descriptors=True)
    assert config_of() == rule
    choices.keep_choice(CUDA, choices.shape_key(**SHAPE), SLOW, 12.5)
    assert config_of() == SLOW
    assert config_of(transpose=True) == rule
    assert choices.read_choices(CUDA) == {"T4096 B8 F3 D64 bfloat16 forward": SLOW}
    assert "nvidia-test" in file.name


def test_a_choice_for_another_table_is_not_used(file):
    choices.keep_choice(CUDA, choices.shape_key(**SHAPE), Config(tables="shifted", prescale="tile"), 1.0)
    assert config_of().tables == "tiles"


def content(schema: str = choices.SCHEMA, **changed) -> str:
    """Return a file whose one choice has other settings than it should; None leaves one out."""
    config = {name: value for name, value in {**SLOW.to_dict(), **changed}.items() if value is not None}
    entry = {"config": config, "microseconds": 1.0}
    return json.dumps({"schema": schema, "choices": {choices.shape_key(**SHAPE): entry}})


def refusal(file, text: str) -> str:
    """Return what the first product says when the file holds `text`."""
    file.parent.mkdir(parents=True)
    file.write_text(text)
    with pytest.raises(InputError) as caught:
        config_of()
    with pytest.raises(InputError):
        choices.keep_choice(CUDA, "another shape", SLOW, 1.0)
    assert file.read_text() == text
    return str(caught.value)


def test_a_whole_file_is_read(file):
    file.parent.mkdir(parents=True)
    file.write_text(content())
    assert config_of() == SLOW


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "TypeError"),
        ("{}", "'schema'"),
        (json.dumps({"schema": choices.SCHEMA, "choices": []}), "AttributeError"),
        (json.dumps({"schema": choices.SCHEMA, "choices": {"shape": {"microseconds": 1.0}}}), "'config'"),
        (json.dumps({"schema": choices.SCHEMA, "choices": {"shape": {"config": 3, "microseconds": 1.0}}}), "got 3"),
        (content(cache=".ca"), r"unknown settings \['cache'\], missing settings \[\]"),
        (content(block_m=None), r"unknown settings \[\], missing settings \['block_m'\]"),
        (content(block_m=48), "power of two"),
        (content(num_warps="4"), "num_warps must be of type int"),
    ],
)
def test_a_damaged_file_is_refused_by_name(file, text, why):
    assert re.search(
        rf"nvidia-test.* is damaged \(.*{why}.*\); remove it and run `saf bench tune` again$", refusal(file, text)
    )


def test_choices_of_an_older_version_are_refused(file):
    older = content(schema="saf.choices/1", cache="", programs_per_sm=0)
    expected = "is of schema 'saf.choices/1', expected 'saf.choices/2'; remove it and run `saf bench tune` again"
    assert expected in refusal(file, older)


def test_tuning_needs_a_device():
    with pytest.raises(UnsupportedError, match="CUDA"):
        tune(**SHAPE, device="cpu")
