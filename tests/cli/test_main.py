"""The `saf` command itself: help, exit codes, errors as one message, warnings as one line, doctor."""

import os
import re
import subprocess
import sys

from saf.cli import COMMANDS
from saf.cli.doctor import OPTIONAL, verdict
from saf.scores import SCORES
from saf.targets import TARGETS


def test_every_command_has_help(saf):
    code, out, _ = saf("--help")
    assert (code, max(map(len, out.splitlines())) <= 80) == (0, True)
    assert all(f"\n  {name} " in out for name in COMMANDS)
    for name in (*COMMANDS, "bench update"):
        code, out, _ = saf(*name.split(), "--help")
        assert (code, f"usage: saf {name}" in out) == (0, True)
    few, every = (saf("freeze", flag)[1] for flag in ("--help", "--help-all"))
    assert ("--help-all" in few, len(few) <= 0.7 * len(every)) == (True, True)
    assert {*SCORES} <= {*re.findall(r"\w+", few)}
    assert {*SCORES, *TARGETS} <= {*re.findall(r"\w+", every)}
    assert all(saf("bench", *words)[:2] == saf("bench", "--help")[:2] for words in ([], ["--help-all"]))


def test_words_that_are_no_command_are_explained(saf):
    for words, hint in (
        (["evalute"], "did you mean `saf evaluate`?"),
        (["xyzzy"], "lists the"),
        (["data", "info"], "`saf data prepare`"),
        (["bench", "layers"], "must be one of"),
    ):
        code, _, err = saf(*words)
        assert (code, hint in err) == (2, True)


def test_the_module_runs_as_a_program_and_imports_no_other_command():
    code = "import sys; from saf.cli import main; main(['-h']); print([n for n in sys.modules if 'saf.cli.' in n])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("[]")
    done = subprocess.run([sys.executable, "-m", "saf", "inspect", "/nowhere"], capture_output=True, text=True)
    assert (done.returncode, done.stderr.startswith("saf inspect: /nowhere does not exist")) == (2, True)


def test_a_closed_pipe_ends_a_command_quietly():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-m", "saf", "--help"], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_doctor_ends_with_a_verdict(saf, saf_json):
    printed = saf_json("doctor")
    assert (printed["devices"][0]["device"], printed["backends"][0]["lines"][-1]) == ("cpu", "auto: toeplitz")
    assert "in PyTorch" in printed["backends"][0]["lines"][1]
    assert {"cudnn", "flash"} <= set(printed["live_kernels"])
    assert saf("doctor")[1].splitlines()[-3:] == list(printed["verdict"].values())
    if printed["devices"][-1]["device"] == "cpu":
        bare = verdict({**printed, "optional": dict.fromkeys(OPTIONAL)})
        assert (bare["does_not"].count("CUDA kernels"), "triton" in bare["to_do"]) == (1, False)
