"""Compiling ahead: what another process compiles are the programs that an event asks for, and a run begins it once."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

import saf
from saf.adapters import adapter_for
from saf.errors import InputError
from saf.freeze_config import FreezeConfig
from saf.machine.execution import Execution
from saf.models import by_layer
from saf.train import ahead, pretrain
from saf.train.ahead import Layouts
from tests.ops.counted_graphs import CountedGraphs

LENGTH = 16
SHAPE = saf.preset("tiny", vocab_size=40, num_layers=3, num_heads=4, hidden_size=32, max_length=LENGTH)


def layouts(**changes) -> Layouts:
    values = {
        **{"model": SHAPE, "length": LENGTH, "batch_size": 2, "execution": Execution.of("cpu", compile="layers")},
        **{"kernel": "auto", "backend": "auto", "trainable": False, "frozen": (1, 2, 4)},
    }
    return Layouts(**{**values, **changes})


@pytest.mark.parametrize(
    "changes", [{}, {"execution": Execution.of("cpu", precision="bf16", compile="layers")}], ids=str
)
def test_an_event_finds_its_programs(monkeypatch, changes):
    """Compiled here in place of another process: not one graph more, whichever heads are frozen."""
    graphs, asked = CountedGraphs(), layouts(**changes)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=graphs))
    monkeypatch.setattr(by_layer, "_programs", {})
    model = saf.GPT(SHAPE)
    ids = torch.zeros(2, LENGTH, dtype=torch.long)

    def update() -> int:
        compiled = adapter_for(model).compiled_by_layer()
        with asked.execution.autocast():
            loss = compiled(ids, targets=ids)
        loss.backward()
        return compiled.new

    update()
    asked.compile()
    before = len(graphs.graphs)
    alpha, rho = torch.randn(2, 7, LENGTH)
    heads = [(0, 3), (1, 0), (1, 2), (2, 0), (2, 1), (2, 2), (2, 3)]
    saf.install_(model, heads, saf.CompactPattern.from_parameters(alpha, rho))
    assert (update(), len(graphs.graphs)) == (0, before)


@pytest.mark.slow
@pytest.mark.timeout(600)  # a compiler of C++, four times, with nothing on disk
def test_an_event_finds_the_code_of_another_process_on_disk(monkeypatch, tmp_path):
    """This process imported PyTorch elsewhere than that one does, and its patterns are others: nothing is made anew."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # code for a CPU is made for a number of threads
    monkeypatch.setattr(by_layer, "_programs", {})
    asked = layouts(frozen=(2,))
    process = ahead.start(asked, tmp_path / "log")
    assert process.wait() == 0, (tmp_path / "log").read_text()
    counters.clear()
    model = saf.GPT(SHAPE)
    alpha, rho = torch.randn(2, 6, LENGTH)
    heads = [(0, 1), (0, 3), (1, 0), (1, 3), (2, 1), (2, 2)]
    saf.install_(model, heads, saf.CompactPattern.from_parameters(alpha, rho))
    streams = adapter_for(model).compiled_by_layer().hidden(torch.zeros(2, LENGTH, dtype=torch.long))
    torch.autograd.backward(streams, [torch.ones_like(stream) for stream in streams])
    found = {name: counters["inductor"][f"fxgraph_cache_{name}"] for name in ("hit", "miss", "bypass")}
    # Attention and MLP, forward and backward. All missed: the compiler's settings differ, which another test changed.
    assert found == {"hit": 4, "miss": 0, "bypass": 0}


def test_what_is_asked_reaches_the_process_as_it_is():
    assert Layouts.from_json(layouts().to_json()) == layouts()


def test_the_process_ends_in_silence_when_all_is_compiled(tmp_path):
    assert ahead.start(layouts(frozen=()), tmp_path / "log").wait(timeout=120) == 0
    assert (tmp_path / "log").read_text() == ""


def test_the_process_ends_with_the_one_that_began_it(tmp_path):
    """As after a kill: nobody says goodbye, the input is closed."""
    process = ahead.start(layouts(), tmp_path / "log")
    process.stdin.close()
    assert process.wait(timeout=120) == 1, (tmp_path / "log").read_text()


class Begun:
    """Stand for the process."""

    def __init__(self):
        self.asked, self.ended = [], 0

    def start(self, asked: Layouts, log: Path) -> "Begun":
        assert log.parent.is_dir()
        self.asked.append(asked)
        return self

    def terminate(self) -> None:
        self.ended += 1

    def wait(self) -> None:
        assert self.ended


def test_a_run_begins_it_once_and_ends_it(settings, monkeypatch):
    begun = Begun()
    monkeypatch.setattr(ahead, "start", begun.start)
    monkeypatch.setattr("torch.compile", lambda model, **_: model)
    monkeypatch.setattr(by_layer, "_programs", {})
    freeze = FreezeConfig(count=1, max_fit_kl=10)
    pretrain(settings(compile="layers", compile_ahead=True, updates=4, freeze=freeze))
    (asked,) = begun.asked
    assert (asked.batch_size, asked.length, asked.frozen, begun.ended) == (4, 32, (1, 2, 3, 4), 1)
    pretrain(
        settings("late", compile="layers", compile_ahead=True, updates=4, freeze=freeze, schedule=saf.OneTime(at=0))
    )
    assert len(begun.asked) == 1, "no event was to come"


@pytest.mark.parametrize("changes", [{"compile": "on"}, {"freeze": FreezeConfig(operation="prune")}, {"freeze": None}])
def test_where_it_would_do_nothing_it_is_refused(settings, changes):
    with pytest.raises(
        InputError, match="compile_ahead has an effect only where heads are frozen with compile='layers'"
    ):
        settings(**{"compile": "layers", "compile_ahead": True, "freeze": FreezeConfig(), **changes})
