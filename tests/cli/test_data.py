import json

import pytest

from saf.cli.data import parse_words
from saf.data import TokenData
from saf.errors import DataError


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.jsonl"
    lines = (json.dumps({"text": f"Document {n}. " + "some words to learn from " * (n % 7 + 3)}) for n in range(80))
    path.write_text("\n".join(lines))
    return path


def run(name: str, *arguments: str) -> dict:
    return parse_words([name, *arguments]).run()


def test_prepare_shows_the_folders_index(text, tmp_path, capsys):
    out = str(tmp_path / "data")
    options = ("--vocab-size", "300", "--heldout-fraction", "0.3")
    result = run("prepare", str(text), "--out", out, *options)
    printed = capsys.readouterr().out
    data = TokenData.open(out, verify=True)
    assert result == {"folder": out, **data.index}
    assert f"{data.num_tokens('train'):,}" in printed
    with pytest.raises(DataError, match="a finished data folder is there"):
        run("prepare", str(text), "--out", out, *options)


def test_several_sources_and_held_out_ones(text, tmp_path):
    more, held = tmp_path / "more.txt", tmp_path / "held.jsonl"
    more.write_text("One more document of training text.")
    held.write_text("\n".join(json.dumps({"text": f"held out {n}"}) for n in range(9)))
    out = str(tmp_path / "data")
    result = run(
        "prepare", str(text), str(more), "--out", out, "--heldout", str(held), "--calibration-from", "train",
        "--vocab-size", "300", "--json",
    )  # fmt: skip
    assert [source["documents"] for source in result["sources"]] == [80, 1]
    assert [source["documents"] for source in result["heldout"]] == [9]
    assert result["calibration_from"] == "train"
    assert result["partitions"]["calibration"]["tokens"] == 0
