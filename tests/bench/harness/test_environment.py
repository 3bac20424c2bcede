"""A benchmark's record tells the clocks of its device, as a stand-in for nvidia-smi has them."""

from types import SimpleNamespace

import pytest
import torch

from saf.bench.harness.environment import clocks, clocks_recorded, driver
from saf.bench.harness.recorder import Recorder
from saf.bench.harness.timing import Budget
from saf.cli.output import machine
from saf.records.provenance import clock_words
from saf.report.provenance import origin_of

CUDA = torch.device("cuda")


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Return a function that makes nvidia-smi a script with these lines."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="11-22"))

    def write(*lines: str) -> None:
        path = tmp_path / "nvidia-smi"
        path.write_text("\n".join(("#!/bin/sh", *lines)))
        path.chmod(0o755)

    return write


@pytest.fixture
def recorder():
    return Recorder(None, kind="update", settings={}, budget=Budget(None), say=lambda line: None)


def test_clocks_before_and_after_stand_beside_the_device(nvidia_smi, recorder, tmp_path):
    query = "--query-gpu=clocks.sm,clocks.mem,power.limit --format=csv,noheader,nounits"
    nvidia_smi(f'[ "$*" = "--id=GPU-11-22 {query}" ] && echo "345, 2619, 700.00"')
    with clocks_recorded(recorder, CUDA):
        nvidia_smi('echo "1980, 2619, [N/A]"')
    provenance = recorder.record["provenance"] | {"device": "Invented 9000", "driver": None}
    assert provenance["clocks"] == {
        "before": {"sm_mhz": 345, "memory_mhz": 2619, "power_limit_watts": 700},
        "after": {"sm_mhz": 1980, "memory_mhz": 2619},
    }
    words = "SM 345 to 1980 MHz, memory 2619 MHz, power limit 700 W"
    assert clock_words(provenance) == words
    assert words in machine(provenance)
    assert words in origin_of(tmp_path / "one.json", tmp_path, provenance)[0]


@pytest.mark.parametrize("lines", [("exit 9",), ("sleep 9",), ("echo '[N/A], [N/A], [N/A]'",), ("echo",)])
def test_without_an_answer_a_record_has_no_clocks(nvidia_smi, recorder, lines, monkeypatch):
    monkeypatch.setattr("saf.machine.driver.SECONDS", 0.3)
    nvidia_smi(*lines)
    with clocks_recorded(recorder, CUDA):
        pass
    assert "clocks" not in recorder.record["provenance"]


def test_a_cpu_is_not_asked_and_the_driver_tells_its_version(nvidia_smi):
    nvidia_smi('echo "580.1"')
    assert clocks(torch.device("cpu")) == {}
    assert driver() == "580.1"
