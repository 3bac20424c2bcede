import errno
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from saf.cli import COMMANDS, main, usage
from saf.errors import InputError, SafWarning
from saf.records.files import write_json
from saf.records.provenance import command


def test_help_lists_every_command(saf):
    code, out, _ = saf("--help")
    assert code == 0
    assert out.strip() == usage()
    assert all(f"\n  {name} " in out for name in COMMANDS)


def test_no_command_shows_help_as_an_error(saf):
    code, out, err = saf()
    assert (code, out) == (2, "")
    assert "usage: saf COMMAND" in err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name, capsys):
    assert main([name, "--help"]) == 0
    assert f"usage: saf {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["evalute"], "saf: there is no command 'evalute'; did you mean `saf evaluate`?"),
        (["xyzzy"], "saf: there is no command 'xyzzy'; `saf --help` lists the commands."),
    ],
)
def test_an_unknown_command_is_explained(saf, arguments, message):
    assert saf(*arguments) == (2, "", f"{message}\n")


def test_an_error_is_one_message_without_a_traceback(saf, tmp_path):
    code, out, err = saf("evaluate", tmp_path)
    assert (code, out) == (2, "")
    assert err.startswith(f"saf evaluate: {tmp_path} holds nothing that saf writes; expected a checkpoint")
    assert "Traceback" not in err
    assert err.count("\n") == 1


def test_frozen_heads_of_other_models_are_not_for_the_commands(saf, tmp_path):
    (tmp_path / "saf.json").write_text("{}")
    code, _, err = saf("evaluate", tmp_path)
    assert code == 2
    assert "holds the frozen heads of a model of another library" in err


def test_a_wrong_option_exits_with_2(capsys):
    assert main(["doctor", "--no-such-option"]) == 2


def test_an_interrupt_is_130(saf, monkeypatch):
    def interrupted(name, rest):
        raise KeyboardInterrupt

    monkeypatch.setattr("saf.cli._command", interrupted)
    assert saf("doctor") == (130, "", "saf doctor: interrupted\n")


def test_an_error_that_another_process_tells_of_is_not_told_twice(saf, monkeypatch):
    error = InputError("too few")

    def failing(name, rest):
        raise error

    monkeypatch.setattr("saf.cli._command", failing)
    assert saf("doctor") == (2, "", "saf doctor: too few\n")
    error.heard = True
    assert saf("doctor") == (2, "", "")


@pytest.mark.parametrize(
    ("name", "number", "advice"),
    [
        ("data", errno.ENOSPC, "Free some space, or write to another disk"),
        ("report", errno.EACCES, "Choose another folder, or allow access to this one"),
        (
            "pretrain",
            errno.ENOSPC,
            "Free some space, or write to another disk. Checkpoints, if there are any, stay: go on ",
        ),
    ],
)
def test_what_the_system_refuses_is_one_message(saf, monkeypatch, name, number, advice):
    def refused(name, rest):
        raise OSError(number, os.strerror(number), "some/file")

    monkeypatch.setattr("saf.cli._command", refused)
    code, out, err = saf(name)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"saf {name}: some/file: {os.strerror(number)}. {advice}")


def test_a_file_in_place_of_a_folder_is_one_message(saf, text_data, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = saf("pretrain", "--data", text_data, "--out", tmp_path / "file", "--quiet", "--device", "cpu")
    assert code == 2
    *_, last = err.splitlines()
    assert last.startswith(f"saf pretrain: {tmp_path / 'file'}")
    assert "Choose another folder" in last


def test_a_full_disk_names_the_file_that_was_to_be_written(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("saf.records.files.os.fsync", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_json(tmp_path / "record.json", {})
    assert caught.value.filename == str(tmp_path / "record.json")
    assert not list(tmp_path.iterdir())


def test_a_record_tells_the_arguments_that_the_command_was_given(saf, monkeypatch):
    recorded = []
    monkeypatch.setattr("sys.argv", ["demo.py"])
    monkeypatch.setattr("saf.cli._command", lambda name, rest: SimpleNamespace(run=lambda: recorded.append(command())))
    assert saf("pretrain", "--out", "a run")[0] == 0
    assert recorded == ["saf pretrain --out 'a run'"]
    recorded = []
    for path in ("demo.py", "tools/demo.py", "/home/me/tools/demo.py", "/usr/bin/saf", "/site/saf/__main__.py"):
        monkeypatch.setattr("sys.argv", [path, "--fast"])
        recorded.append(command())
    assert recorded[:3] == ["python demo.py --fast", "python tools/demo.py --fast", "python demo.py --fast"]
    assert recorded[3:] == ["saf --fast"] * 2


def test_a_bug_keeps_its_traceback(saf, monkeypatch):
    def broken(name, rest):
        raise ZeroDivisionError

    monkeypatch.setattr("saf.cli._command", broken)
    with pytest.raises(ZeroDivisionError):
        saf("doctor")


def test_the_module_runs_as_a_program_and_imports_no_other_command():
    code = "import sys; from saf.cli import main; main(['-h']); print([n for n in sys.modules if 'saf.cli.' in n])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("[]")
    done = subprocess.run([sys.executable, "-m", "saf", "inspect", "/nowhere"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("saf inspect: /nowhere does not exist; expected a checkpoint")


def test_doctor_names_backend_packages_and_devices(saf, saf_json):
    printed = saf_json("doctor")
    assert printed["devices"][0]["device"] == "cpu"
    assert printed["packages"]["torch"]
    assert any(line.startswith("auto: ") for line in printed["backends"][0]["lines"])
    assert {"cudnn", "flash", "fa3", "fa4"} <= set(printed["live_kernels"])
    assert printed["live_kernels"]["math"] is None
    code, out, _ = saf("doctor")
    assert code == 0
    assert "frozen heads on cpu, float32:" in out


def test_doctor_readme_and_docs_name_the_same_families(saf, saf_json):
    told, root = saf_json("doctor")["families"], Path(__file__).resolve().parents[2]
    names, shown = list(told), saf("doctor")[1]
    assert {"Llama", "GPT-2", "Phi-3", "Gemma 3"} <= set(names)
    assert "sliding window" in told["Gemma 2"]
    assert all(f"│ {name} " in shown for name in names)
    rows = (root / "README.md").read_text().split("## Supported models")[1].split("\n\n")[1].splitlines()[3:]
    listed = ", ".join(row.split("|")[1].strip() for row in rows).replace(" of transformers 5.17 and later", "")
    assert sorted(listed.split(", ")) == sorted(names)
    text = (root / "docs" / "huggingface.md").read_text()
    for title, then in (("## What is tested", "## Families"), ("## Families", "## How to add a family")):
        lines = text.split(title)[1].split(then)[0].splitlines()
        assert [line.split("|")[1].strip() for line in lines if line.startswith("| ")][1:] == names


def test_doctor_says_what_is_missing(saf, saf_json, monkeypatch):
    monkeypatch.setattr("saf.machine.survey.shutil.which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("saf.cli.doctor.package_version", lambda name: None if name == "transformers" else "1.0")
    assert saf_json("doctor")["optional"]["transformers"] is None
    assert json.dumps(saf_json("doctor")["compilers"]["torch.compile on cpu"]).startswith('"needs a C++ compiler')
    assert "for what is missing: pip install 'saf[hf]'" in saf("doctor")[1]


def test_a_warning_is_one_plain_line(monkeypatch, capsys):
    def warn():
        warnings.warn("ask for fewer calibration_sequences", SafWarning, stacklevel=2)

    monkeypatch.setattr("saf.cli._command", lambda name, words: SimpleNamespace(run=warn))
    assert main(["pretrain"]) == 0
    assert capsys.readouterr().err == "saf pretrain: ask for fewer calibration_sequences\n"
