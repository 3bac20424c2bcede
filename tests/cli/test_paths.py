"""Every path that a command takes: what is wrong with it, in one line, and nothing is written."""

import pytest

from saf.cli import main

COMMANDS = """data prepare P --out OUT; data prepare python --tokenizer P --out OUT; pretrain --data P --out OUT
pretrain --parent P --out OUT; pretrain --resume --out P; freeze P --out OUT; evaluate P; compare P P; report P
inspect P"""


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
