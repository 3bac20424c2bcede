"""What can be said of prefill graphs without a GPU; tests/gpu replays one."""

from functools import partial

import pytest
import torch
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

import saf
import saf.bench.whole as measured
from saf.bench.protocol import Arm, Point
from saf.errors import InputError, UnsupportedError
from saf.heads import HeadSet
from saf.machine import GraphPool, own_program
from saf.models.adapter import adapter_for
from saf.ops import FrozenHeads, for_graphs
from saf.patterns import CompactPattern
from saf.prefill import LastToken
from saf.surgery import install_


def frozen_model() -> saf.GPT:
    model = saf.GPT(saf.preset("tiny", vocab_size=64, max_length=32)).eval()
    install_(model, HeadSet([(0, 0), (1, 1)]), CompactPattern.from_parameters(*torch.randn(2, 2, 32)))
    return model


def marks(model: torch.nn.Module) -> set[bool]:
    return {module.replayed for module in model.modules() if isinstance(module, FrozenHeads)}


def test_the_last_token_has_the_model_s_logits():
    model = saf.GPT(saf.preset("tiny", vocab_size=64, max_length=32)).eval()
    tokens = torch.randint(0, 64, (2, 20))
    torch.testing.assert_close(LastToken(model)(tokens), model(tokens)[:, -1:])


def test_a_cpu_is_refused():
    with pytest.raises(UnsupportedError, match="CUDA"):
        saf.Prefill(saf.GPT(saf.preset("tiny")), batch_size=1, length=8)


def test_a_shape_that_the_patterns_do_not_cover_is_refused():
    model = saf.GPT(saf.preset("tiny", vocab_size=64, max_length=32))
    install_(model, HeadSet([(0, 0)]), CompactPattern.from_parameters(*torch.randn(2, 1, 16)))
    with pytest.raises(InputError, match="length must be 1 to 16 tokens; got 17"):
        saf.Prefill(model, batch_size=1, length=17)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.zeros(1, 3, dtype=torch.long), r"captured for \[1, 4\] token ids; got \[1, 3\]"),
        (torch.zeros(1, 4), "whole numbers; got torch.float32"),
    ],
)
def test_other_token_ids_than_captured_ones_are_refused(tokens, message):
    prefill = object.__new__(saf.Prefill)  # a capture needs a GPU
    prefill._shape = (1, 4)
    with pytest.raises(InputError, match=message):
        prefill(tokens)


def test_programs_of_one_function_know_nothing_of_one_another(monkeypatch):
    """Each is compiled once, for its own sizes, whatever the others were compiled for."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    model = frozen_model()
    programs = [LastToken(model).compiled() for _ in range(2)]
    codes = [program.func.__wrapped__.__code__ for program in programs]
    torch._dynamo.reset()
    with torch.no_grad():
        for length, program in ((20, programs[0]), (9, programs[1]), (20, programs[0])):
            tokens = torch.randint(0, 64, (1, length))
            torch.testing.assert_close(program(tokens), model(tokens)[:, -1:], rtol=1e-4, atol=1e-4)
    assert codes[0] is not codes[1]
    assert [len(_debug_get_cache_entry_list(code)) for code in codes] == [1, 1]
    assert own_program(marks)(model) == {False}


def test_the_mark_for_graphs_is_as_before_once_its_block_is_left():
    model = frozen_model()
    with for_graphs(model):
        assert marks(model) == {True}
        with pytest.raises(ZeroDivisionError), for_graphs(model):
            raise ZeroDivisionError
        assert marks(model) == {True}
    assert marks(model) == {False}


def test_a_benchmark_captures_another_program_than_it_calls(monkeypatch):
    """With a stand-in for the capture, which a CPU has none of: layers are marked for graphs in that program alone."""
    seen = []

    class Watched(LastToken):
        def compiled(self, **_):
            made, number = self, len({number for number, _ in seen})

            def program(tokens):
                seen.append((number, marks(made.model)))
                return made(tokens)

            return program

    class Capture:
        def __init__(self, call, **_):
            self.call, self.outcome = call, call()

        def __call__(self):
            self.outcome = self.call()

    monkeypatch.setattr(measured, "LastToken", Watched)
    monkeypatch.setattr(measured, "GraphReplay", Capture)
    monkeypatch.setattr("saf.bench.speed.ways_of", lambda graphs, device: ("call", "graph"))
    settings = measured.Prefill(device="cpu", compile="on", model="tiny", warmup=1, repeats=1, graphs="both")
    point = Point(16, 1, precision="fp32")
    subject = settings.build(point, Arm("math", "toeplitz", 0.5), GraphPool())
    subject.warm_up()
    assert [marked for number, marked in seen if number == 0] == [{False}] * seen.index((1, {True}))
    assert {number for number, _ in seen} == {0, 1}
    seen.clear()
    assert subject.timed_block("call") > 0
    assert seen
    assert all(found == (0, {False}) for found in seen)
    assert marks(subject.model) == {False}


@pytest.mark.parametrize("one_graph", [True, False])
def test_a_program_is_one_graph_where_its_model_is_written_to_be_one(monkeypatch, one_graph):
    model, asked = frozen_model(), []
    monkeypatch.setattr(type(adapter_for(model)), "one_graph", one_graph)
    monkeypatch.setattr(torch, "compile", lambda function, **given: asked.append(given) or function)
    LastToken(model).compiled()(torch.zeros(1, 4, dtype=torch.long))
    assert asked == [{"fullgraph": one_graph, "dynamic": False}]
