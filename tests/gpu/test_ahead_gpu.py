"""On a CUDA device: an event compiles nothing where another process compiled its layouts."""

import pytest
import torch
from torch._dynamo.utils import counters

import saf
from saf.adapters import adapter_for
from saf.machine.execution import Execution
from saf.models import by_layer
from saf.train.ahead import Layouts, start

pytestmark = pytest.mark.gpu
LENGTH = 256
SHAPE = saf.preset("tiny", vocab_size=128, num_layers=3, num_heads=4, hidden_size=256, max_length=LENGTH)
HEADS = [(0, 1), (1, 0), (1, 3)]


def drawn() -> saf.GPT:
    model = saf.GPT(SHAPE).cuda()
    model.reset_parameters(torch.Generator("cuda").manual_seed(0))
    return model


def patterns() -> saf.CompactPattern:
    generator = torch.Generator().manual_seed(1)
    return saf.CompactPattern.from_parameters(*torch.randn(2, len(HEADS), LENGTH, generator=generator))


def test_an_event_finds_all_its_code_on_disk(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(by_layer, "_programs", {})
    model, execution = drawn(), Execution.of("cuda", compile="layers")
    ids = torch.zeros(2, LENGTH, dtype=torch.long, device="cuda")

    def update() -> None:
        with execution.autocast():
            loss = adapter_for(model).compiled_by_layer()(ids, targets=ids)
        loss.backward()

    update()
    asked = {"model": SHAPE, "length": LENGTH, "batch_size": 2, "execution": execution, "frozen": (1, 2)}
    process = start(Layouts(**asked, kernel="auto", backend="auto", trainable=False), tmp_path / "log")
    assert process.wait() == 0, (tmp_path / "log").read_text()
    counters.clear()
    saf.install_(model, HEADS, patterns())
    update()
    found = counters["inductor"]
    assert found["fxgraph_cache_miss"] == found["fxgraph_cache_bypass"] == 0, "something was compiled anew"
    assert found["fxgraph_cache_hit"] == 4  # two layouts, forward and backward
