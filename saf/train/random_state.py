"""Every random state a resumed run needs, as JSON values."""

import random
from typing import Any

import numpy as np
import torch


def capture_random_state() -> dict[str, Any]:
    """Return the states of Python's, NumPy's and torch's global generators (CPU, and CUDA when in use)."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {
        "python": [version, list(words), gauss],
        "numpy": [name, [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        "torch": _to_hex(torch.get_rng_state()),
        "cuda": [_to_hex(state) for state in cuda],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Put the global generators back in captured states; CUDA ones for as many devices as both sides have."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_from_hex(state["torch"]))
    for index, hexadecimal in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(_from_hex(hexadecimal), index)


def _to_hex(state: torch.Tensor) -> str:
    return state.cpu().numpy().tobytes().hex()


def _from_hex(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
