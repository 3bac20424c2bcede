"""`tools/measure.py`: commands that their programs take, and records that a kill or a short time costs little of."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from saf.bench.kinds import BENCHMARKS
from saf.cli.bench import COMMANDS
from tools import compare_compile, measure

TOOL = os.path.relpath(measure.ROOT / "tools" / "compare_compile.py")
FULL = {"finished": True, "seconds": 10.0, "left_out": [], "memory": [], "settings": {}}
ROW = {"pairs": 4, "refused": False, "control_ratio": 1.001}
DONE = FULL | {"rows": [ROW]}
SHORT = FULL | {"rows": [ROW | {"pairs": 2}], "left_out": [{"what": "T=32", "why": "pairs 3 to 4: out of time"}]}
KILLED = FULL | {"rows": [], "finished": False}
REFUSED = FULL | {"rows": [ROW | {"refused": True, "control_ratio": 1.03}]}


@pytest.mark.parametrize("rehearse", [False, True])
def test_every_command_is_one_that_its_program_takes(rehearse):
    inputs = {name: name for name in measure.INPUTS}
    for entry in measure.ENTRIES.values():
        line = measure.line_of(entry, inputs=inputs, seconds=100.0, out=Path("new.json"), rehearse=rehearse)
        program = line.index("bench") if "bench" in line else line.index(TOOL)
        kind, *words = line[program + 1 :] if "bench" in line else ("", *line[program + 1 :])
        if not kind:
            assert compare_compile.parser_of_words().parse_args(words).out == Path("new.json")
            continue
        settings = COMMANDS[kind].from_words(words)
        assert settings.out == Path("new.json")
        if rehearse:
            assert settings.device == "cpu"
        if kind in ("update", "prefill", "decode", "op"):
            assert BENCHMARKS[kind].points(settings)


class Commands:
    """Writes the next record in place of each command, as a command does that is stopped at its end or before."""

    def __init__(self):
        self.records: list[dict | None] = []
        self.lines: list[list[str]] = []

    def __call__(self, line, **_):
        self.lines.append(line)
        out = Path(line[line.index("--out") + 1])
        assert not out.exists(), "commands write new files alone"
        record = self.records.pop(0)
        if record is None:
            raise KeyboardInterrupt
        out.write_text(json.dumps(record))
        return SimpleNamespace(returncode=0)

    @property
    def names(self) -> list[str]:
        return [Path(line[-1]).stem for line in self.lines]


@pytest.fixture
def commands(monkeypatch) -> Commands:
    found = Commands()
    monkeypatch.setattr(measure, "subprocess", SimpleNamespace(run=found))
    entries = {name: measure.Entry(100, f"saf bench update --points {name}") for name in ("a", "b", "c")}
    monkeypatch.setattr(measure, "ENTRIES", entries)
    return found


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (DONE, ""),
        (SHORT, "out of time: T=32"),
        (KILLED, "stopped before its end"),
        (REFUSED, "refused: controls of 1.0300"),
        (FULL | {"rows": []}, "holds nothing"),
        (DONE | {"left_out": [{"what": "50% fused", "why": "it needs CUDA"}]}, ""),
    ],
)
def test_what_a_record_lacks_is_told_and_measured_again_last(commands, tmp_path, capsys, record, words):
    (tmp_path / "a.json").write_text(json.dumps(record))
    commands.records = [DONE, DONE, DONE]
    assert words in measure.standing(tmp_path / "a.json").lacks
    assert measure.main(["--out", str(tmp_path)]) == 0
    assert commands.names == (["b", "c", "a"] if words else ["b", "c"])
    assert measure.main(["--out", str(tmp_path)]) == 0
    assert len(commands.lines) == (3 if words else 2), "nothing is measured twice"
    assert not list(tmp_path.glob("*.earlier"))


def test_a_kill_costs_the_measurement_that_ran_alone(commands, tmp_path):
    """The record of a shorter measurement stays until a better one is whole."""
    (tmp_path / "a.json").write_text(json.dumps(SHORT))
    commands.records = [DONE, DONE, None]
    with pytest.raises(KeyboardInterrupt):
        measure.main(["--out", str(tmp_path)])
    assert json.loads((tmp_path / "a.earlier").read_text()) == SHORT
    (tmp_path / "a.json").write_text(json.dumps(KILLED))  # as far as the killed one came
    commands.records = [SHORT | {"rows": []}]
    assert measure.main(["--out", str(tmp_path)]) == 1
    assert json.loads((tmp_path / "a.json").read_text()) == SHORT, "the better one of both"
    commands.records = [DONE]
    assert measure.main(["--out", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "a.json").read_text()) == DONE


def test_nothing_begins_that_is_foretold_to_end_too_late_and_what_was_short_gets_more_time(commands, tmp_path, capsys):
    commands.records = [SHORT | {"seconds": 140.0}, DONE, DONE]
    assert measure.main(["--out", str(tmp_path), "--minutes", "3"]) == 1
    told = capsys.readouterr().out
    assert "a: out of time: T=32" in told
    first = commands.lines[0]
    assert float(first[first.index("--seconds") + 1]) == pytest.approx(150, abs=1), "half as long again"
    assert measure.main(["--out", str(tmp_path), "--minutes", "3"]) == 1
    assert "a: not begun: 230 s are foretold, out of time: T=32" in capsys.readouterr().out
    commands.records = [DONE]
    assert measure.main(["--out", str(tmp_path), "--minutes", "9"]) == 0
    second = commands.lines[-1]
    assert float(second[second.index("--seconds") + 1]) == pytest.approx(315, abs=1)


def test_commands_without_their_inputs_are_named(commands, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(
        measure.ENTRIES, "a", measure.Entry(9, "saf bench finetune --data {tasks}/x --test {tokenizer}")
    )
    assert measure.main(["--out", str(tmp_path), "a"]) == 1
    assert "a: not begun: it needs --tasks and --tokenizer" in capsys.readouterr().out
    commands.records = [DONE]
    assert measure.main(["--out", str(tmp_path), "a", "--tasks", "data", "--tokenizer", "gpt2"]) == 0
    assert "data/x" in commands.lines[0]
