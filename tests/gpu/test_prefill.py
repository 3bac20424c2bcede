"""Prefill graphs: replays read new tokens, and keep no memory of results."""

import pytest
import torch

import saf
from saf.errors import InputError
from saf.heads import HeadSet
from saf.synthetic import synthetic_patterns

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("length", [200, 1100])
@pytest.mark.parametrize("compile", [False, True])
def test_replays_agree_with_the_model(compile, length):
    """Few tokens, all heads in one launch, and more, frozen heads after live ones."""
    model = saf.GPT(saf.preset("tiny", max_length=1100)).cuda().eval()
    heads = HeadSet([(0, 0), (0, 1), (1, 3), *((2, head) for head in range(4))])
    saf.install_(model, heads, synthetic_patterns(len(heads), 1100, torch.Generator().manual_seed(0), "cuda"))
    prefill = saf.Prefill(model, batch_size=2, length=length, compile=compile)
    first, second = torch.randint(0, 2048, (2, 2, length), device="cuda").unbind()
    actual = prefill(first)
    again = prefill(second)
    for tokens, logits in ((first, actual), (second, again)):
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            expected = model(tokens)[:, -1:]
        assert (logits - expected).float().norm() < 2e-2 * expected.float().norm()
    with pytest.raises(InputError, match="capture again"):
        prefill(first[:1])
