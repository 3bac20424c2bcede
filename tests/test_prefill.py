"""What can be said of prefill graphs without a GPU; tests/gpu replays one."""

import pytest
import torch

import saf
from saf.errors import InputError, UnsupportedError
from saf.heads import HeadSet
from saf.ops import FrozenHeads, for_graphs
from saf.patterns import CompactPattern
from saf.prefill import LastToken
from saf.surgery import install_


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


def test_the_mark_for_graphs_is_as_before_once_its_block_is_left():
    model = saf.GPT(saf.preset("tiny", vocab_size=64, max_length=16)).eval()
    install_(model, HeadSet([(0, 0), (1, 1)]), CompactPattern.from_parameters(*torch.randn(2, 2, 16)))
    layers = [module for module in model.modules() if isinstance(module, FrozenHeads)]
    with for_graphs(model):
        with pytest.raises(ZeroDivisionError), for_graphs(model):
            raise ZeroDivisionError
        assert [layer.replayed for layer in layers] == [True, True]
    assert [layer.replayed for layer in layers] == [False, False]
