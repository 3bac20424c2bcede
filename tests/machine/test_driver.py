"""What the driver says, by a stand-in for nvidia-smi."""

import pytest

from saf.machine import driver


@pytest.fixture
def answering(tmp_path, monkeypatch):
    """Put a program that answers so in nvidia-smi's place."""

    def put(answer: str, code: int = 0) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\nprintf '{answer}'\nexit {code}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))

    return put


def test_the_smallest_memory_is_that_of_every_gpu_s_smallest(answering):
    answering("143771\\n81559\\n")
    assert driver.smallest_memory_bytes() == 81559 * 2**20


@pytest.mark.parametrize(("answer", "code"), [("", 0), ("[N/A]\\n", 0), ("No devices were found\\n", 6)])
def test_without_an_answer_nothing_is_known(answering, answer, code):
    answering(answer, code)
    assert driver.smallest_memory_bytes() is None


def test_without_a_driver_nothing_is_known(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert driver.asked("memory.total") == ""
    assert driver.smallest_memory_bytes() is None
