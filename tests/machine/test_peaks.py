import pytest

from saf.machine.peaks import rated_flops


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
    assert rated_flops(name, precision) == expected
