"""Two processes train, by a Trainer or a loop of one's own: they freeze together, and DDP gets new gradient buckets."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import saf
from saf.models.adapter import adapter_for
from tests.integrations.training import CONFIG, UPDATES, Killed, frozen, opened, same, trainer, transformers
from tests.train.helpers import run_ranks
from tests.transformers_models import make, tokens

pytest.importorskip("accelerate.utils.dataclasses")

RESUMES = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23)
"""transformers 5.17 loads the optimiser of several processes on a CPU to "cpu:0", which PyTorch does not know."""
FIRST_LAYER = [(0, 0), (0, 1), (0, 2), (0, 3), (1, 1)]
"""A layer without live heads, and one with some."""
CASES = {
    "once": (CONFIG, {"family": "llama"}),
    "layer": (
        saf.FreezeConfig(heads=FIRST_LAYER, max_fit_kl=99),
        # Without the search for weights that a pass leaves out: all must have a gradient, or not be waited for.
        {"family": "qwen3", "ddp_find_unused_parameters": False, "gradient_checkpointing": True},
    ),
}


def trained(folder, case, *killed, rank=0, processes=1, resume=None):
    """Train as many windows an update, whatever the number of processes; return the Trainer, events and losses."""
    from saf.integrations.transformers import FreezeCallback

    config, options = CASES[case]
    # What each process would measure by itself differs: the first one's counts.
    freezing = FreezeCallback(config, [tokens(seed=1 + rank)], saf.OneTime(0.5), heldout=[tokens(2, seed=11 + rank)])
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4 // processes}
    run = trainer(folder, freezing, *killed, **sizes, **options)
    run.train(resume_from_checkpoint=resume)
    events = [[one.kind, one.update, one.heads] for one in freezing.events]
    losses = [each["loss"] for each in run.state.log_history if "loss" in each]
    return run, *json.loads(json.dumps([events, losses]))


def looped(accelerator=None, rank=0):
    """Train on the same sequences whatever the number of processes; return the model's state, heads and losses."""
    model = make("qwen3").double().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    processes, losses, own = 1, [], model
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
        processes = accelerator.num_processes
    for update in range(6):
        if update == 3:
            saf.freeze_(own, [tokens(seed=1 + rank)], CASES["layer"][0], optimizer=optimizer)
            model = own if accelerator is None else accelerator.prepare_model(own)
        rows = tokens(4, seed=20 + update).chunk(processes)[rank]
        loss = model(rows, labels=rows, use_cache=False).loss
        loss.backward() if accelerator is None else accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item() if accelerator is None else accelerator.reduce(loss.detach(), "mean").item())
    state = {name: one.detach().clone() for name, one in own.named_parameters()}
    return state, adapter_for(own).heads("frozen").to_list(), losses


def write(folder, rank, state, *outcome):
    folder.mkdir(exist_ok=True)
    save_file(state, folder / f"{rank}.safetensors")
    (folder / f"{rank}.json").write_text(json.dumps(outcome))


def work(rank: int, folder: str) -> None:
    """Train every case, the first one once more, killed and resumed, and the loop; write weights and outcomes."""
    from accelerate import Accelerator, DistributedDataParallelKwargs

    for name, case, resume in [*((name, name, None) for name in CASES), *([("again", "once", True)] * RESUMES)]:
        if resume:
            with pytest.raises(KeyboardInterrupt):
                trained(Path(folder) / name, case, Killed(5), rank=rank, processes=2)
        run, *outcome = trained(Path(folder) / name, case, rank=rank, processes=2, resume=resume)
        assert type(run.model_wrapped).__name__ == "DistributedDataParallel"
        state = {name: one.clone() for name, one in run.model.state_dict().items()}
        write(Path(folder) / name, rank, state, *outcome)
    # No pass reads weights of queries and keys where no head is live: PyTorch's wrapper must not wait for them.
    handlers = [DistributedDataParallelKwargs(find_unused_parameters=True)]
    accelerator = Accelerator(cpu=True, kwargs_handlers=handlers)
    assert accelerator.num_processes == 2
    write(Path(folder) / "loop", rank, *looped(accelerator, rank))


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    folder = tmp_path_factory.mktemp("group")
    run_ranks(2, work, str(folder))
    return folder


def written(folder, rank=0):
    return load_file(folder / f"{rank}.safetensors"), *json.loads((folder / f"{rank}.json").read_text())


@pytest.mark.parametrize("name", CASES)
def test_two_processes_train_and_freeze_as_one_does_and_hold_the_same_bits(name, group, tmp_path):
    run, *alone = trained(tmp_path, name)
    (weights, events, losses), (other, other_events, _) = (written(group / name, rank) for rank in range(2))
    assert events == other_events == alone[0]
    assert losses == pytest.approx(alone[1], rel=2e-3)
    for key, parameter in run.model.named_parameters():
        torch.testing.assert_close(weights[key], parameter.detach(), rtol=5e-3, atol=2e-3)
    assert same(weights, other)


@pytest.mark.skipif(not RESUMES, reason="this version of transformers cannot resume several processes on a CPU")
def test_killed_and_resumed_it_ends_bit_for_bit_the_same(group):
    weights, events, _ = written(group / "once")
    for rank in range(2):
        assert same(written(group / "again", rank)[0], weights)
    model = opened(group / "again" / f"checkpoint-{UPDATES}")
    assert same(model, weights)
    assert frozen(model).to_list() == events[0][2]


def test_a_loop_of_ones_own_freezes_in_both_processes_and_trains_as_one_does(group):
    (state, *outcome), (other, *others) = (written(group / "loop", rank) for rank in range(2))
    assert others == outcome
    assert same(state, other)
    alone, heads, losses = looped()
    assert outcome[0] == [list(head) for head in heads]
    assert outcome[1] == pytest.approx(losses, rel=1e-6)
    for name, one in alone.items():
        torch.testing.assert_close(state[name], one, rtol=1e-4, atol=1e-6)
