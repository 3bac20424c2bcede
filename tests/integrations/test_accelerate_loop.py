"""A loop of one's own with several processes of accelerate: heads freeze in all of them, with the optimiser."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import saf
from saf.models.adapter import adapter_for
from tests.train.helpers import together
from tests.transformers_models import make, tokens

pytest.importorskip("accelerate.utils.dataclasses")

UPDATES, ROWS = 6, 4
"""Updates, and sequences of each, of all processes together."""
WHOLE_LAYER = [(0, 0), (0, 1), (0, 2), (0, 3), (1, 1)]
CASES = {
    "qwen3": ("qwen3", saf.FreezeConfig(count=4, max_fit_kl=99)),
    "layer": ("qwen3", saf.FreezeConfig(heads=WHOLE_LAYER, max_fit_kl=99)),
}


def trained(family, config, accelerator=None, rank=0):
    """Train on the same sequences whatever the number of processes; return model, optimiser and each update's loss."""
    model = make(family).double().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    processes, losses = 1, []
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
        processes = accelerator.num_processes
    for update in range(UPDATES):
        if update == UPDATES // 2:
            own = model if accelerator is None else accelerator.unwrap_model(model)
            # What each process would measure by itself differs: the first one's counts.
            saf.freeze_(own, [tokens(seed=1 + rank)], config, optimizer=optimizer)
            model = own if accelerator is None else accelerator.prepare_model(own)
        rows = tokens(ROWS, seed=20 + update).chunk(processes)[rank]
        loss = model(rows, labels=rows, use_cache=False).loss
        loss.backward() if accelerator is None else accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item() if accelerator is None else accelerator.reduce(loss.detach(), "mean").item())
    return model if accelerator is None else accelerator.unwrap_model(model), optimizer, losses


def moments(model, optimizer):
    """The optimiser's first moments, by the weights' names."""
    state = optimizer.state
    return {
        f"moment.{name}": state[one]["exp_avg"] for name, one in model.named_parameters() if "exp_avg" in state[one]
    }


def work(rank: int, folder: str) -> None:
    """Train every case in this process of two, and keep what came of it."""
    from accelerate import Accelerator, DistributedDataParallelKwargs

    for name, (family, config) in CASES.items():
        # No pass reads weights of queries and keys where no head is live, which PyTorch's wrapper is to be told.
        handlers = [DistributedDataParallelKwargs(find_unused_parameters=True)] if name == "layer" else []
        accelerator = Accelerator(cpu=True, kwargs_handlers=handlers)
        assert accelerator.num_processes == 2
        model, optimizer, losses = trained(family, config, accelerator, rank)
        kept = model.state_dict() | moments(model, optimizer)
        save_file({key: one.clone() for key, one in kept.items()}, Path(folder) / f"{name}-{rank}.safetensors")
        told = [adapter_for(model).heads("frozen").to_list(), losses]
        (Path(folder) / f"{name}-{rank}.json").write_text(json.dumps(told))


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    folder = tmp_path_factory.mktemp("accelerate")
    together(2, work, str(folder))
    return folder


@pytest.mark.parametrize("name", CASES)
def test_two_processes_freeze_together_and_train_as_one_does(name, group):
    kept = [load_file(group / f"{name}-{rank}.safetensors") for rank in range(2)]
    (heads, losses), other = (json.loads((group / f"{name}-{rank}.json").read_text()) for rank in range(2))
    assert other == [heads, losses]
    assert kept[0].keys() == kept[1].keys()
    assert all(torch.equal(one, kept[1][key]) for key, one in kept[0].items())

    model, optimizer, alone = trained(*CASES[name])
    assert heads == [list(head) for head in adapter_for(model).heads("frozen")]
    assert losses == pytest.approx(alone, rel=1e-6)
    for key, one in (dict(model.named_parameters()) | moments(model, optimizer)).items():
        torch.testing.assert_close(kept[0][key], one.detach(), rtol=1e-4, atol=1e-6)
