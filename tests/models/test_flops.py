import pytest
import torch

from saf.models import GPT, preset


@pytest.mark.parametrize("name", ["tiny", "124m"])
def test_counts_every_matrix_of_the_model_once(name):
    config = preset(name)
    with torch.device("meta"):
        model = GPT(config)
    weights = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 2)
    without_attention = config.flops_per_token(0)
    assert without_attention == 6 * weights
    # Causal attention: two products of 2 * T/2 * C forward, twice that backward.
    assert config.flops_per_token(512) - without_attention == 3 * 2 * 2 * 256 * config.hidden_size * config.num_layers
