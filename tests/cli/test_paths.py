"""Every path that a command or a function takes: what was expected, what is there, and what to do, in one line."""

import json

import pytest

import saf as package
from saf.cli import main
from saf.data import TokenData
from saf.errors import SafError
from saf.opening import find_model
from saf.records.run import read_events
from tests.freezing.small_model import make, tokens

COMMANDS = {
    "data prepare": "data prepare P --out OUT",
    "data prepare --tokenizer": "data prepare python --tokenizer P --out OUT",
    "pretrain --data": "pretrain --data P --out OUT",
    "pretrain --parent": "pretrain --parent P --out OUT",
    "pretrain --resume": "pretrain --resume --out P",
    "freeze": "freeze P --out OUT",
    "evaluate": "evaluate P",
    "compare": "compare P P",
    "report": "report P",
    "inspect": "inspect P",
}
READ = {
    "load": package.load,
    "load into a model": lambda path: package.load(make(), path),
    "TokenData.open": TokenData.open,
    "find_model": find_model,
}
WRITE = {
    "save": lambda path: package.save(make(), path),
    "read_events": read_events,
}
ADVICE = ("expected", "must be", "give", "make one", "name a new folder", "save writes a folder")


@pytest.fixture(scope="module")
def wrong(tmp_path_factory):
    """Nothing, an empty folder, text, JSON of another kind, JSON that is no object, and bytes."""
    root = tmp_path_factory.mktemp("wrong")
    (root / "empty").mkdir()
    (root / "text.txt").write_bytes(b"hello")
    (root / "other.json").write_text("{}")
    (root / "list.json").write_text("[]")
    (root / "bytes.json").write_bytes(b"\xff\xfe\0")
    return [root / name for name in ("missing", "empty", "text.txt", "other.json", "list.json", "bytes.json")]


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_say_what_they_expected_and_what_is_there(name, wrong, tmp_path, capsys):
    for path in wrong:
        if name == "data prepare" and path.is_file():
            continue  # any text is what it takes
        words = [word.replace("OUT", str(tmp_path / "out")) for word in COMMANDS[name].split()]
        assert main([str(path) if word == "P" else word for word in words]) == 2, path
        told = capsys.readouterr().err
        assert told.startswith(f"saf {name.split()[0]}: "), told
        assert str(path) in told
        assert any(words in told for words in (*ADVICE, "supported:", "holds no results", "start a new run")), told
        assert told.count("\n") == 1
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [*READ, *WRITE])
def test_functions_say_so_too(name, wrong):
    for path in wrong[:1] * (name in READ) + wrong[1:2] * (name in READ) + wrong[2:]:
        for given in (path, str(path)):
            with pytest.raises(SafError) as error:
                ({**READ, **WRITE}[name])(given)
            assert str(path) in str(error.value)
            assert any(words in str(error.value) for words in ADVICE), error.value


def test_events_are_recorded_in_a_folder_that_is_there(wrong):
    model = make()
    report = package.freeze_(model, [tokens()], package.FreezeConfig(max_fit_kl=100))
    for path in (wrong[0], wrong[2]):
        with pytest.raises(SafError, match="folder that holds it"):
            report.save(path)
    assert json.loads((wrong[3]).read_text()) == {}
