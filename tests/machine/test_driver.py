"""What the driver says, by a stand-in for nvidia-smi."""

from saf.machine import driver


def test_the_driver_s_answer_is_given_and_nothing_where_it_fails_or_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert driver.asked("memory.total") == ""
    program = tmp_path / "nvidia-smi"
    for code, answer in ((0, "143771\n81559\n"), (6, "")):
        program.write_text(f"#!/bin/sh\nprintf '143771\\n81559\\n'\nexit {code}\n")
        program.chmod(0o755)
        assert driver.asked("memory.total") == answer
