"""Tensors that processes hold in shares: each writes its own at once, and any number of processes reads them.

PyTorch's distributed checkpoint does both. Its writer pickles what is no tensor into a file that is named safetensors,
so nothing but tensors is handed to it. The header of a file says where its pieces lie in the whole; a file that one
process wrote has no such header, and is read the same way. What of PyTorch is for shares alone is loaded where there
are some: it takes as long as half of PyTorch itself.
"""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.optim import AdamW

from saf.errors import CheckpointError
from saf.machine.processes import agreed, done_once, gathered, group_place
from saf.train.optimizer import MOMENTS, STEP


def is_share(tensor: Tensor) -> bool:
    """Return whether a tensor is held in shares, which those of a group of processes are alone."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def in_shares(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether processes hold some of the tensors in shares."""
    return any(map(is_share, tensors.values()))


def write_shares(folder: Path, name: str, tensors: Mapping[str, Tensor]) -> list[str]:
    """Write, as every process of the group, what this one holds of tensors into `name-I-of-N.safetensors`.

    What all hold whole stands in one of the files. Returns the names of the files that all wrote. Raises
    CheckpointError for what is no tensor, OSError for a full disk; both in every process.
    """
    if wrong := [key for key, value in tensors.items() if not isinstance(value, Tensor)]:
        raise CheckpointError(f"{name} files hold tensors alone; {wrong[0]} is {type(tensors[wrong[0]]).__name__}")
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    own = folder / f".{name}"  # the writer names its files itself
    writer = HuggingFaceStorageWriter(str(own), save_distributed=True)
    _carried_out(lambda: save(dict(tensors), storage_writer=writer))
    number, count = group_place()
    with agreed():
        mine = sorted(own.glob(f"shard-{number + 1:05}-*"))  # shard-00001-model-00001-of-00001.safetensors; or none
        written = [f"{name}-{number + 1}-of-{count}.safetensors" for _ in mine]
        for path, named in zip(mine, written, strict=True):
            path.rename(folder / named)
    found = [each for names in gathered(written) for each in names]
    done_once(own.rmdir)
    return found


def read_shares(folder: Path, name: str) -> dict[str, Tensor]:
    """Return the whole tensors of the files that `write_shares` made, on the CPU, in this process alone."""
    kept = _reader(folder).read_metadata()
    of = {index.fqn for index, at in kept.storage_data.items() if Path(at.relative_path).name.startswith(f"{name}-")}
    known: dict[str, Any] = {each: kept.state_dict_metadata[each] for each in sorted(of)}
    tensors = {each: torch.empty(one.size, dtype=one.properties.dtype) for each, one in known.items()}
    _read_(tensors, folder)
    return tensors


def fill_shares_(model: nn.Module, optimizer: AdamW | None, folder: Path) -> None:
    """Fill, as every process of the group, the shares of a model and its optimiser with a checkpoint's tensors.

    Each process reads what it holds, however many wrote the files, or one. Without an optimiser its moments stay.
    Raises CheckpointError for a tensor that is missing or of another shape.
    """
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.numel()}
    wanted: dict[str, Tensor] = {name: parameter.detach() for name, parameter in parameters.items()}
    kept = _reader(folder).read_metadata().state_dict_metadata
    for name, parameter in parameters.items():
        if optimizer is None or f"{name}.{STEP}" not in kept:
            continue
        state = {STEP: torch.zeros((), device=parameter.device), **{of: torch.zeros_like(parameter) for of in MOMENTS}}
        optimizer.state[parameter] = state
        wanted |= {f"{name}.{of}": tensor.detach() for of, tensor in state.items()}
    _read_(wanted, folder)


def _reader(folder: Path) -> Any:
    """Return what reads the files of a folder."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    return HuggingFaceStorageReader(str(folder))


def _read_(tensors: dict[str, Tensor], folder: Path) -> None:
    """Fill tensors from the files of a folder; of those in shares, every process fills its own."""
    from torch.distributed.checkpoint.state_dict_loader import load

    reader, alone = _reader(folder), not in_shares(tensors)
    try:
        _carried_out(lambda: load(tensors, storage_reader=reader, no_dist=alone))
    except (RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder} does not fit the model it describes: {error}") from error


def _carried_out(work: Callable[[], object]) -> None:
    """Do work of the distributed checkpoint; of what fails in any process, raise the first failure in all."""
    from torch.distributed.checkpoint.api import CheckpointException

    with warnings.catch_warnings():
        # It says that one process alone reads or writes, which is what was asked for.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            work()
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from error
