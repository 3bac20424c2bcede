"""Every path that a command or a function takes: what is wrong with it, in one line, and nothing is written."""

import pytest

import saf as package
from saf.cli import main
from saf.data import TokenData
from saf.errors import SafError
from saf.opening import find_model
from saf.records.run import read_events
from tests.freezing.small_model import make, tokens

COMMANDS = """data prepare P --out OUT; data prepare python --tokenizer P --out OUT; pretrain --data P --out OUT
pretrain --parent P --out OUT; pretrain --resume --out P; freeze P --out OUT; evaluate P; compare P P; report P
inspect P"""
FUNCTIONS = {
    "load": package.load,
    "load into a model": lambda path: package.load(make(), path),
    "TokenData.open": TokenData.open,
    "find_model": find_model,
    "save": lambda path: package.save(make(), path),
    "read_events": read_events,
}


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


@pytest.mark.parametrize("command", COMMANDS.replace("\n", "; ").split("; "))
def test_commands_name_a_wrong_path(command, wrong, tmp_path, capsys):
    # Any text is what `data prepare` takes.
    for path in wrong[:2] if command.startswith("data prepare P") else wrong:
        words = [{"P": str(path), "OUT": str(tmp_path / "out")}.get(word, word) for word in command.split()]
        assert main(words) == 2, path
        err = capsys.readouterr().err
        assert err.startswith(f"saf {words[0]}: "), err
        assert (str(path) in err, err.count("\n")) == (True, 1), err
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_do_so_too(name, wrong):
    for path in wrong[2:] if name in ("save", "read_events") else wrong:
        for written in (path, str(path)):
            with pytest.raises(SafError, match=str(path)):
                FUNCTIONS[name](written)


def test_events_are_recorded_in_a_folder_that_is_there(wrong):
    report = package.freeze_(make(), [tokens()], package.FreezeConfig(max_fit_kl=100))
    for path in (wrong[0], wrong[2]):
        with pytest.raises(SafError, match="folder that holds it"):
            report.save(path)
