"""The `saf` command itself: help, exit codes, errors as one message, warnings as one line, doctor."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from saf.cli import COMMANDS, main


def test_help_lists_every_command_and_fits_80_columns(saf):
    code, out, _ = saf("--help")
    assert code == 0

    assert all(f"\n  {name} " in out for name in COMMANDS)
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("words", [*([name] for name in COMMANDS), ["bench", "update"]], ids=" ".join)
def test_every_command_has_help(words, capsys):
    assert main([*words, "--help"]) == 0
    assert f"usage: saf {' '.join(words)}" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["freeze"], ["pretrain"], ["finetune"], ["bench", "update"]], ids=" ".join)
def test_help_has_two_tiers(saf, words):
    first, every = (saf(*words, flag)[1] for flag in ("--help", "--help-all"))
    count = [len(re.findall(r"^[|│ ]+--", text, re.MULTILINE)) for text in (first, every)]
    assert 10 < count[0] <= 0.7 * count[1]
    assert "--help-all" in first
    rates = [re.search(r"-rate FLOAT.*?default: ([\d.]+)", text, re.DOTALL) for text in (first, every)]
    assert len({rate and rate[1] for rate in rates}) == 1


@pytest.mark.parametrize(("word", "hint"), [("evalute", "did you mean `saf evaluate`?"), ("xyzzy", "lists the")])
def test_an_unknown_command_is_explained(saf, word, hint):
    code, _, err = saf(word)
    assert (code, hint in err) == (2, True)


def test_an_error_is_one_message_without_a_traceback(saf, tmp_path):
    code, out, err = saf("evaluate", tmp_path)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"saf evaluate: {tmp_path} holds nothing that saf writes")
    (tmp_path / "saf.json").write_text("{}")
    code, _, err = saf("evaluate", tmp_path)
    assert (code, "frozen heads of another library's model" in err) == (2, True)


def test_a_file_in_place_of_a_folder_is_one_message(saf, text_data, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = saf("pretrain", "--data", text_data, "--out", tmp_path / "file", "--quiet", "--device", "cpu")
    assert code == 2
    last = err.splitlines()[-1]
    assert last.startswith(f"saf pretrain: {tmp_path / 'file'}")
    assert "--resume" in last


def test_the_module_runs_as_a_program_and_imports_no_other_command():
    code = "import sys; from saf.cli import main; main(['-h']); print([n for n in sys.modules if 'saf.cli.' in n])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("[]")
    done = subprocess.run([sys.executable, "-m", "saf", "inspect", "/nowhere"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("saf inspect: /nowhere does not exist")


def test_doctor_names_backend_packages_and_devices(saf, saf_json):
    printed = saf_json("doctor")
    assert printed["devices"][0]["device"] == "cpu"
    assert printed["packages"]["torch"]
    assert any(line.startswith("auto: ") for line in printed["backends"][0]["lines"])
    assert {"cudnn", "flash", "fa3", "fa4"} <= set(printed["live_kernels"])
    code, out, _ = saf("doctor")
    assert code == 0
    assert "frozen heads on cpu, float32" in out
    assert out.splitlines()[-3].startswith("Works here: ")


def test_doctor_and_docs_name_the_same_families(saf_json):
    names, root = list(saf_json("doctor")["families"]), Path(__file__).resolve().parents[2]
    text = (root / "docs" / "huggingface.md").read_text()
    lines = text.split("## Families")[1].split("## How to add a family")[0].splitlines()
    assert [line.split("|")[1].strip() for line in lines if line.startswith("| ")][1:] == names


def test_records_tell_the_command(saf_json, arms, tmp_path):
    saf_json("evaluate", arms[0], "--out", tmp_path / "evaluation", "--device", "cpu", "--limit", 2)
    record = json.loads((tmp_path / "evaluation" / "evaluation.json").read_text())
    assert record["provenance"]["command"].startswith("saf evaluate ")
