"""The `saf` command itself: help, exit codes, errors as one message, warnings as one line, doctor."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from saf.cli import COMMANDS
from saf.cli.doctor import OPTIONAL, verdict
from saf.hf.families import FAMILIES
from saf.scores import SCORES
from saf.targets import TARGETS


def test_help_lists_every_command_and_fits_80_columns(saf):
    code, out, _ = saf("--help")
    assert code == 0
    assert all(f"\n  {name} " in out for name in COMMANDS)
    assert max(map(len, out.splitlines())) <= 80


def test_every_command_has_help(saf):
    for name in (*COMMANDS, "bench update"):
        code, out, _ = saf(*name.split(), "--help")
        assert (code, f"usage: saf {name}" in out) == (0, True)
    assert all(saf("bench", *words)[:2] == saf("bench", "--help")[:2] for words in ([], ["--help-all"]))
    assert all(saf(*words)[0] == 2 for words in (["data", "info"], ["bench", "layers"]))


@pytest.mark.parametrize("words", [["freeze"], ["pretrain"], ["finetune"], ["bench", "update"]], ids=" ".join)
def test_help_has_two_tiers(saf, words):
    first, every = (saf(*words, flag)[1] for flag in ("--help", "--help-all"))
    count = [len(re.findall(r"^[|│ ]+--", text, re.MULTILINE)) for text in (first, every)]
    assert 10 < count[0] <= 0.7 * count[1]
    assert "--help-all" in first


def test_the_whole_help_names_scores_and_patterns(saf):
    words = saf("freeze", "--help-all")[1].replace(",", " ").replace(".", " ").split()
    assert {*SCORES, *TARGETS} <= {*words}


def test_an_unknown_command_is_explained(saf):
    for word, hint in (("evalute", "did you mean `saf evaluate`?"), ("xyzzy", "lists the")):
        code, _, err = saf(word)
        assert (code, hint in err) == (2, True)


def test_of_processes_that_torchrun_started_the_first_alone_refuses_words(saf, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    for rank, shown in (("0", True), ("1", False)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        code, out, err = saf("pretrain", "--widht", 3)
        assert (code, out, bool(err)) == (2, "", shown)


def test_an_error_is_one_message_without_a_traceback(saf, tmp_path):
    code, out, err = saf("evaluate", tmp_path)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"saf evaluate: {tmp_path} holds nothing that saf writes")
    (tmp_path / "saf.json").write_text("{}")
    code, _, err = saf("evaluate", tmp_path)
    assert (code, "the frozen heads of a model that keeps its own weights" in err) == (2, True)


def test_the_module_runs_as_a_program_and_imports_no_other_command():
    code = "import sys; from saf.cli import main; main(['-h']); print([n for n in sys.modules if 'saf.cli.' in n])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("[]")
    done = subprocess.run([sys.executable, "-m", "saf", "inspect", "/nowhere"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("saf inspect: /nowhere does not exist")


@pytest.mark.parametrize("words", ["--help", "data --help", "doctor --json"])
def test_a_closed_pipe_ends_a_command_quietly(words):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-m", "saf", *words.split()], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_doctor_ends_with_a_verdict(saf, saf_json):
    printed = saf_json("doctor")
    assert (printed["devices"][0]["device"], printed["backends"][0]["lines"][-1]) == ("cpu", "auto: toeplitz")
    assert {"cudnn", "flash"} <= set(printed["live_kernels"])
    code, out, _ = saf("doctor")
    assert code == 0
    assert out.splitlines()[-3:] == list(printed["verdict"].values())
    if printed["devices"][-1]["device"] == "cpu":
        bare = verdict({**printed, "optional": dict.fromkeys(OPTIONAL)})
        assert (bare["does_not"].count("CUDA kernels"), "triton" in bare["to_do"]) == (1, False)


def test_the_documents_name_the_families_that_freeze():
    names, root = [family.name for family in FAMILIES], Path(__file__).resolve().parents[2]
    text = (root / "docs" / "huggingface.md").read_text()
    lines = text.split("## Families")[1].split("## How to add a family")[0].splitlines()
    assert [line.split("|")[1].strip() for line in lines if line.startswith("| ")][1:] == names
