"""What can be said of prefill graphs without a GPU; tests/gpu replays one."""

from functools import partial

import pytest
import torch
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

import saf
from saf.errors import InputError, UnsupportedError
from saf.heads import HeadSet
from saf.machine import own_program
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
