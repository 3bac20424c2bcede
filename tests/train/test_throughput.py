import pytest
import torch

from saf.machine.peaks import flops_per_token, peak_flops
from saf.models import GPT, preset


@pytest.mark.parametrize("name", ["tiny", "124m"])
def test_counts_every_matrix_of_the_model_once(name):
    config = preset(name)
    with torch.device("meta"):
        model = GPT(config)
    weights = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 2)
    without_attention = flops_per_token(config, 0)
    assert without_attention == 6 * weights
    # Causal attention: two products of 2 * T/2 * C forward, twice that backward.
    assert flops_per_token(config, 512) - without_attention == 3 * 2 * 2 * 256 * config.hidden_size * config.num_layers


@pytest.mark.parametrize(
    ("name", "precision", "expected"),
    [
        ("NVIDIA H200", "bf16", 989e12),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA H200", "fp32", None),
        ("cpu (x86_64, 2 threads)", "bf16", None),
    ],
)
def test_unknown_peaks_are_not_guessed(name, precision, expected):
    assert peak_flops(name, precision) == expected
