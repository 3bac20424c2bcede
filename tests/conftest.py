import gc
import os
import socket
from collections.abc import Iterator
from pathlib import Path

# Before huggingface_hub is imported: it reads this once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Before PyTorch is imported: waiting threads give the core back, which matters on a shared machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import hypothesis
import numpy as np
import pytest
import torch

SHARED = Path(__file__).resolve().parents[2] / "shared"
REAL_HEADS = Path(__file__).parent / "fixtures" / "rope-124m-4k-12-heads.npz"
"""Six heads over all layers, four of the lowest variance, and the two that compact patterns fit worst, in this order.

float32: in float16 the fits would miss their reference by 2e-3 nats, a thousand times more.
"""
LOCAL_HOSTS = ("127.0.0.1", "::1", "localhost")

hypothesis.settings.register_profile("saf", deadline=None, derandomize=True, max_examples=25, database=None)
hypothesis.settings.load_profile("saf")


def pytest_configure() -> None:
    # Bits may depend on the number of threads, so it is the same on every machine; several tests run at a time.
    torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    # What was imported stays to the end; each time garbage is collected, looking at all of it takes 0.3 s.
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True, scope="session")
def no_network() -> Iterator[None]:
    """Let tests connect to this machine only."""
    connect = socket.socket.connect

    def local_only(self: socket.socket, address) -> None:
        if self.family != socket.AF_UNIX and address[0] not in LOCAL_HOSTS:
            raise AssertionError(f"tests do not use the network; this one tried {address}")
        return connect(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", local_only)
        yield


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what data folders are remembered by out of the cache folder of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True, scope="session")
def no_wait_for_disks() -> Iterator[None]:
    """Let the system write files when it likes: no test cuts the power, and a recipe's runs alone wait 4,000 times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)
        yield


@pytest.fixture(scope="session")
def shared() -> Path:
    """Real corpora, tokenizers and patterns, in a folder beside the repository that not every checkout has."""
    if not SHARED.is_dir():
        pytest.skip("no folder ../shared beside the repository")
    return SHARED


@pytest.fixture(scope="session")
def text_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small data folder."""
    from tests.report.synthetic import write_data

    return write_data(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def real_heads() -> dict[str, torch.Tensor]:
    """Statistics of 12 heads of a 124M RoPE decoder at 4,096 positions, `[12, ...]`: see `REAL_HEADS`."""
    with np.load(REAL_HEADS, allow_pickle=False) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def nan_empty() -> Iterator[None]:
    """Fill what `torch.empty` returns with NaN, so that an output left unwritten shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
