"""What can be said of prefill graphs without a GPU; tests/gpu replays one."""

import pytest
import torch

import saf
from saf.errors import UnsupportedError
from saf.prefill import LastToken


def test_the_last_token_has_the_model_s_logits():
    model = saf.GPT(saf.preset("tiny", vocab_size=64, max_length=32)).eval()
    tokens = torch.randint(0, 64, (2, 20))
    torch.testing.assert_close(LastToken(model)(tokens), model(tokens)[:, -1:])


def test_a_cpu_is_refused():
    with pytest.raises(UnsupportedError, match="CUDA"):
        saf.Prefill(saf.GPT(saf.preset("tiny")), batch_size=1, length=8)
