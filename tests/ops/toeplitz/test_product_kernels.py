"""The Toeplitz product against float64: every table and scaling, both directions, awkward shapes."""

import subprocess
import sys

import pytest

from saf.errors import InputError
from tests.ops.toeplitz.product_cases import CASES

TOLERANCE = {"float32": 1e-6, "float16": 6e-4, "bfloat16": 4.5e-3}


def _result(results: dict, name: str) -> dict:
    """Return a case's results or skip with its reason."""
    if "skip" in results[name]:
        pytest.skip(results[name]["skip"])
    return results[name]


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_float64(toeplitz_results, name):
    """The relative L2 error is rounding only, with NaN beyond T, between heads and in unused scalings."""
    assert _result(toeplitz_results, name)["repeats"]
    assert _result(toeplitz_results, name)["error"] <= TOLERANCE[CASES[name].dtype]


@pytest.mark.parametrize("name", CASES)
def test_writes_its_view_alone(toeplitz_results, name):
    """Writing into a strided view touches nothing around it."""
    assert _result(toeplitz_results, name)["around_untouched"]


@pytest.mark.parametrize("name", CASES)
def test_is_causal(toeplitz_results, name):
    """Changing later inputs (earlier ones for the transpose) leaves outputs equal to the bit, and others not."""
    result = _result(toeplitz_results, name)
    assert result["causal"]
    assert result["noticed"]


def test_new_output_is_ready_for_the_projection(toeplitz_results):
    """Without `out` the result is laid out as [B, T, F, D]."""
    assert _result(toeplitz_results, "default-forward")["layout"]


def test_importing_saf_loads_no_triton():
    """A cold import of the package leaves Triton alone."""
    code = "import sys, saf; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.fixture
def operands():
    """Valid arguments that a test may spoil."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from saf.ops.toeplitz.config import make_tables

    tables = make_tables(torch.rand(2, 40), kind="shifted", dtype=torch.float32)
    return {"x": torch.randn(1, 2, 33, 8), "tables": tables, "pre": torch.rand(2, 40), "post": torch.rand(2, 40)}


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        ({"x": lambda x: x.double()}, "bfloat16, float16 or float32"),
        ({"x": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3)}, "stride 1"),
        ({"pre": lambda pre: pre[:, :10]}, "pre must cover 2 heads and 33 positions"),
        ({"post": lambda post: post.double()}, "post must be float32"),
        ({"tables": lambda tables: tables[:1]}, "serve 2 heads"),
    ],
)
def test_refuses_what_it_cannot_do(operands, spoil, text):
    """Arguments that do not fit are refused before any launch, naming what was expected."""
    from saf.ops.toeplitz.launch import toeplitz_matmul

    for name, change in spoil.items():
        operands[name] = change(operands[name])
    with pytest.raises(InputError, match=text):
        toeplitz_matmul(**operands, transpose=False)


def test_refuses_a_bad_configuration():
    """Unknown tables, odd blocks and blocks beyond the padding are refused."""
    pytest.importorskip("triton")
    from saf.ops.toeplitz.config import Config

    with pytest.raises(InputError, match="tables must be one of"):
        Config(tables="fft")
    with pytest.raises(InputError, match="loads must be one of"):
        Config(prescale="tile", loads="descriptor")
    with pytest.raises(InputError, match="num_stages must be at least 1"):
        Config(num_stages=0)
    with pytest.raises(InputError, match="block_n must be of type int"):
        Config(block_n="128")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="power of two"):
        Config(block_m=48)
    with pytest.raises(InputError, match="must not exceed 256 and block_k 128"):
        Config(tables="shifted", block_k=256)
    with pytest.raises(InputError, match="must not exceed 128"):
        Config(tables="tiles", block_m=256)
