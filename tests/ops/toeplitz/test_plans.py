"""A product is planned once for a layout; another layout is planned for itself."""

import weakref

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from saf.errors import InputError  # noqa: E402
from saf.ops import launch as launching  # noqa: E402
from saf.ops.toeplitz import launch  # noqa: E402
from saf.ops.toeplitz.config import Config, make_tables  # noqa: E402
from saf.ops.toeplitz.launch import toeplitz_matmul  # noqa: E402
from tests.ops.kernel_stub import Kernel  # noqa: E402

CUDA = torch.device("cuda", 0)
POINTER = Config(tables="shifted", prescale="tile", block_m=64, block_n=32, block_k=32)
DESCRIPTOR = Config(loads="descriptor", block_n=64)
KERNELS = ("toeplitz_kernel", "toeplitz_descriptor_kernel", "prescale_kernel")


@pytest.fixture
def kernels(monkeypatch):
    """Kernels that record their launches, and nothing remembered."""
    monkeypatch.setattr(launching, "_compiled", {})
    monkeypatch.setattr(launch, "_plans", {})
    stubs = {name: Kernel(*getattr(launch, name).arg_names) for name in KERNELS}
    for name, stub in stubs.items():
        monkeypatch.setattr(launch, name, stub)
    return stubs


@pytest.fixture
def planned(monkeypatch):
    """The configurations of all plans that are made."""
    made, original = [], launch._planned

    def recording(*arguments):
        made.append(arguments[6])
        return original(*arguments)

    monkeypatch.setattr(launch, "_planned", recording)
    return made


def operands(*, kind="shifted", dtype=torch.float32, batch=1, length=64, extra=0) -> dict:
    tables = make_tables(torch.rand(2, length + extra), kind=kind, dtype=dtype)
    x = torch.randn(batch, length, 2, 64).to(dtype).transpose(1, 2)
    return {"x": x, "tables": tables, "pre": torch.rand(2, length + extra), "post": torch.rand(2, length + extra)}


def test_the_second_call_only_launches(kernels, planned):
    for _ in range(2):
        given = operands()
        out = toeplitz_matmul(**given, transpose=False, config=POINTER)
    kernel = kernels["toeplitz_kernel"]
    assert len(planned) == kernel.compiled == len(kernel.direct) == 1
    grid, args = kernel.direct[0]
    assert grid == (4, 1, 1)
    assert list(args[:5]) == [tensor.data_ptr() for tensor in (*given.values(), out)]
    named = dict(zip(kernel.arg_names, args, strict=True))
    assert (named["T"], named["N"], named["BM"], named["TRANSPOSE"], named["x_stride_t"]) == (64, 64, 64, False, 128)
    assert out.shape == given["x"].shape
    assert out.stride() == given["x"].stride()


@pytest.mark.parametrize(
    "change",
    [
        {"x": lambda x: x.contiguous()},
        {"x": lambda x: torch.cat([x, x])},
        {"tables": lambda tables: torch.cat([tables, tables[..., -256:]], dim=-1)},
        {"pre": lambda pre: torch.cat([pre, pre], dim=1)},
        {"post": lambda post: torch.cat([post, post], dim=1)[:, :64]},
        {"transpose": lambda _: True},
        {"precision": lambda _: "tf32"},
        {"config": lambda _: Config(tables="shifted", prescale="tile", block_m=32, block_n=32, block_k=32)},
        {"out": lambda _: torch.empty(1, 2, 64, 64)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_any_other_layout_or_setting_is_planned_for_itself(kernels, planned, change):
    given = operands() | {"transpose": False, "config": POINTER, "precision": "ieee"}
    toeplitz_matmul(**given)
    name, made = next(iter(change.items()))
    given[name] = made(given.get(name))
    for _ in range(2):
        toeplitz_matmul(**given)
    assert len(planned) == kernels["toeplitz_kernel"].compiled == 2
    assert len(kernels["toeplitz_kernel"].direct) == 1


def test_memory_of_another_alignment_is_looked_at_again(kernels, planned):
    given = operands()
    for x in (given["x"], torch.zeros(64 * 128 + 1)[1:].view(1, 64, 2, 64).transpose(1, 2), given["x"]):
        toeplitz_matmul(**given | {"x": x}, transpose=False, config=POINTER)
    assert len(planned) == 1
    assert kernels["toeplitz_kernel"].compiled == 2
    assert len(kernels["toeplitz_kernel"].direct) == 1


def test_what_does_not_fit_is_refused_every_time(kernels):
    given = operands()
    toeplitz_matmul(**given, transpose=False, config=POINTER)
    for _ in range(2):
        with pytest.raises(InputError, match="pre must cover 2 heads and 64 positions"):
            toeplitz_matmul(**given | {"pre": given["pre"][:, :63]}, transpose=False, config=POINTER)
        with pytest.raises(InputError, match="choose loads='pointer'"):
            toeplitz_matmul(**operands(kind="tiles"), transpose=False, config=DESCRIPTOR)


@pytest.mark.parametrize("config", [POINTER, DESCRIPTOR], ids=lambda config: config.loads)
def test_plans_keep_no_memory_alive(kernels, config):
    half = config is DESCRIPTOR
    given = operands(kind=config.tables, dtype=torch.float16 if half else torch.float32)
    given["out"] = toeplitz_matmul(**given, transpose=False, config=config)
    for _ in range(2):
        toeplitz_matmul(**given, transpose=False, config=config)
    for kernel in kernels.values():
        kernel.direct.clear()
    left = [weakref.ref(tensor) for tensor in given.values()]
    del given
    assert [tensor() for tensor in left] == [None] * 5


def test_descriptors_of_a_repeated_call_are_those_triton_would_check(kernels):
    from triton.tools.tensor_descriptor import TensorDescriptor

    for _ in range(2):
        given = operands(kind="tiles", dtype=torch.float16, length=300, batch=2)
        toeplitz_matmul(**given, transpose=False, config=DESCRIPTOR)
    assert len(kernels["prescale_kernel"].direct) == 1
    made = kernels["toeplitz_descriptor_kernel"].direct[0][1][:2]
    scaled = made[0].base
    assert scaled.data_ptr() == kernels["prescale_kernel"].direct[0][1][2]
    stacked = given["tables"].view(-1, 128)
    for have, memory, block in zip(made, (scaled, stacked), ([1, 64, 64], [128, 64]), strict=True):
        want = TensorDescriptor.from_tensor(memory, block)
        assert have.base.data_ptr() == want.base.data_ptr()
        assert {**vars(have), "base": None} == {**vars(want), "base": None}
    assert scaled.shape == (2, 300, 128)


def test_plans_are_bounded(kernels, monkeypatch):
    monkeypatch.setattr(launch, "MOST", 3)
    for length in range(1, 10):
        toeplitz_matmul(**operands(length=length), transpose=False, config=POINTER)
    assert len(launch._plans) <= 3


def test_nothing_is_launched_for_no_elements(kernels):
    given = operands(batch=0)
    for _ in range(2):
        assert toeplitz_matmul(**given, transpose=False, config=POINTER).shape == (0, 2, 64, 64)
    assert not kernels["toeplitz_kernel"].asked


def test_memory_that_descriptors_cannot_describe_is_refused_every_time():
    described = launch.Described((4, 64), [4, 64])
    memory = torch.zeros(4 * 64 + 1, dtype=torch.float16)
    described(memory[:-1].view(4, 64))
    for _ in range(2):
        with pytest.raises(AssertionError, match="16-byte aligned"):
            described(memory[1:].view(4, 64))
