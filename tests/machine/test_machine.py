"""Forms of compilation that "auto" means, and rated speeds."""

import pytest
import torch

from saf.machine import Execution, rated_flops


@pytest.mark.parametrize(
    ("compile", "several", "expected"),
    [
        ("auto", False, (True, False)),
        ("auto", True, (True, True)),
        ("on", True, (True, False)),
        ("layers", False, (True, True)),
        ("off", True, (False, False)),
    ],
)
def test_several_events_compile_by_layers_on_a_gpu(monkeypatch, compile, several, expected):
    on_cpu = Execution.of("cpu", compile=compile, several_events=several)
    assert (on_cpu.compile, on_cpu.by_layer) == ((False, False) if compile == "auto" else expected)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    on_cuda = Execution.of("cuda", compile=compile, several_events=several)
    assert (on_cuda.compile, on_cuda.by_layer) == expected


def test_unknown_speeds_are_not_guessed():
    assert rated_flops("NVIDIA H200", "bf16") == 989e12
    assert rated_flops("NVIDIA A100-SXM4-80GB", "bf16") == 312e12
    assert rated_flops("NVIDIA H200", "fp32") is rated_flops("cpu (x86_64, 2 threads)", "bf16") is None
