"""A loop of one's own with two processes of accelerate: heads freeze in both, with the optimiser."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import saf
from saf.models.adapter import adapter_for
from tests.train.helpers import run_ranks
from tests.transformers_models import make, tokens

pytest.importorskip("accelerate.utils.dataclasses")

UPDATES, ROWS = 6, 4
"""Updates, and sequences of each, of all processes together."""
CONFIG = saf.FreezeConfig(heads=[(0, 0), (0, 1), (0, 2), (0, 3), (1, 1)], max_fit_kl=99)
"""A layer without live heads, and one with some."""


def trained(accelerator=None, rank=0):
    """Train on the same sequences whatever the number of processes; return the model's state, heads and losses."""
    model = make("qwen3").double().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    processes, losses, own = 1, [], model
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
        processes = accelerator.num_processes
    for update in range(UPDATES):
        if update == UPDATES // 2:
            # What each process would measure by itself differs: the first one's counts.
            saf.freeze_(own, [tokens(seed=1 + rank)], CONFIG, optimizer=optimizer)
            model = own if accelerator is None else accelerator.prepare_model(own)
        rows = tokens(ROWS, seed=20 + update).chunk(processes)[rank]
        loss = model(rows, labels=rows, use_cache=False).loss
        loss.backward() if accelerator is None else accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item() if accelerator is None else accelerator.reduce(loss.detach(), "mean").item())
    state = {name: one.detach().clone() for name, one in own.named_parameters()}
    return state, [adapter_for(own).heads("frozen").to_list(), losses]


def work(rank: int, folder: str) -> None:
    """Train in this process of two, and write its state and losses."""
    from accelerate import Accelerator, DistributedDataParallelKwargs

    # No pass reads weights of queries and keys where no head is live: PyTorch's wrapper must not wait for them.
    handlers = [DistributedDataParallelKwargs(find_unused_parameters=True)]
    accelerator = Accelerator(cpu=True, kwargs_handlers=handlers)
    assert accelerator.num_processes == 2
    state, outcome = trained(accelerator, rank)
    save_file(state, Path(folder) / f"{rank}.safetensors")
    (Path(folder) / f"{rank}.json").write_text(json.dumps(outcome))


def test_two_processes_freeze_together_and_train_as_one_does(tmp_path):
    run_ranks(2, work, str(tmp_path))
    states = [load_file(tmp_path / f"{rank}.safetensors") for rank in range(2)]
    (heads, losses), other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert other == [heads, losses]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(one, states[1][name]) for name, one in states[0].items())
    state, (alone, expected) = trained()
    assert heads == [list(head) for head in alone]
    assert losses == pytest.approx(expected, rel=1e-6)
    for name, one in state.items():
        torch.testing.assert_close(states[0][name], one, rtol=1e-4, atol=1e-6)
