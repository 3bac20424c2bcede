"""FreezeCallback where two processes train: they freeze together, and DDP gets new gradient buckets."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import saf
from saf.models.adapter import adapter_for
from tests.train.helpers import together
from tests.transformers_models import make, tokens

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

UPDATES = 8
RESUMES = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23)
"""transformers 5.17 loads the optimiser of several processes on a CPU to "cpu:0", which PyTorch does not know."""
FIRST_LAYER = [(0, 0), (0, 1), (0, 2), (0, 3), (1, 1)]
"""A layer without live heads, and one with some."""
CASES = {
    "once": (saf.FreezeConfig(count=4, max_fit_kl=99), {"family": "llama"}),
    "layer": (
        saf.FreezeConfig(heads=FIRST_LAYER, max_fit_kl=99),
        # Without the search for weights that a pass leaves out: all must have a gradient, or not be waited for.
        {"family": "qwen3", "ddp_find_unused_parameters": False, "gradient_checkpointing": True},
    ),
}


class Killed(transformers.TrainerCallback):
    """Stop abruptly after an update."""

    def on_step_end(self, args, state, control, **_):
        if state.global_step == 5:
            raise KeyboardInterrupt


def trained(folder, case, *, rank=0, processes=1, stopped=False, resume=None):
    """Train as many windows an update, whatever the number of processes; return Trainer and callback."""
    from saf.integrations.transformers import FreezeCallback

    config, options = CASES[case]
    options = dict(options)
    model, rows = make(options.pop("family")), [{"input_ids": row, "labels": row} for row in tokens(48, seed=9)]
    # What each process would measure by itself differs: the first one's counts.
    heldout = [tokens(2, seed=11 + rank)]
    freezing = FreezeCallback(config, [tokens(seed=1 + rank)], saf.OneTime(0.5), heldout=heldout)
    settings = {"use_cpu": True, "max_steps": UPDATES, "per_device_train_batch_size": 2, "save_steps": 2}
    settings |= {"logging_steps": 1, "learning_rate": 1e-2, "report_to": [], "disable_tqdm": True}
    settings |= {"gradient_accumulation_steps": 4 // processes}
    args = transformers.TrainingArguments(str(folder), **settings | options)
    callbacks = [freezing, *([Killed()] if stopped else [])]
    run = transformers.Trainer(model, args, train_dataset=rows, callbacks=callbacks)
    try:
        run.train(resume_from_checkpoint=resume)
    except KeyboardInterrupt:
        assert stopped
    return run, freezing


def outcome(run, freezing):
    """Events and losses as plain values."""
    events = [[one.kind, one.update, one.heads] for one in freezing.events]
    return json.loads(json.dumps([events, [each["loss"] for each in run.state.log_history if "loss" in each]]))


def work(rank: int, folder: str) -> None:
    """Train every case, and the first one once more, killed and resumed; keep the weights and the outcome."""
    processes = {"rank": rank, "processes": 2}
    if RESUMES:
        trained(Path(folder) / "again", "once", stopped=True, **processes)
    for name, case, resume in [*((name, name, None) for name in CASES), *([("again", "once", True)] * RESUMES)]:
        run, freezing = trained(Path(folder) / name, case, resume=resume, **processes)
        assert type(run.model_wrapped).__name__ == "DistributedDataParallel"
        state = {name: one.clone() for name, one in run.model.state_dict().items()}
        save_file(state, Path(folder) / name / f"{rank}.safetensors")
        (Path(folder) / name / f"{rank}.json").write_text(json.dumps(outcome(run, freezing)))


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    folder = tmp_path_factory.mktemp("group")
    together(2, work, str(folder))
    return folder


def kept(folder, rank=0):
    return load_file(folder / f"{rank}.safetensors"), *json.loads((folder / f"{rank}.json").read_text())


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_train_and_freeze_as_one_does_and_hold_the_same_bits(name, group, tmp_path):
    run, freezing = trained(tmp_path, name)
    weights, events, losses = kept(group / name)
    mine = outcome(run, freezing)
    assert events == mine[0]
    assert losses == pytest.approx(mine[1], rel=2e-3)
    for key, parameter in run.model.named_parameters():
        torch.testing.assert_close(weights[key], parameter.detach(), rtol=5e-3, atol=2e-3)
    other, other_events, _ = kept(group / name, 1)
    assert same(weights, other)
    assert events == other_events


@pytest.mark.skipif(not RESUMES, reason="this version of transformers cannot resume several processes on a CPU")
def test_killed_and_resumed_it_ends_bit_for_bit_the_same(group):
    weights, events, _ = kept(group / "once")
    for rank in range(2):
        assert same(kept(group / "again", rank)[0], weights)
    opened = transformers.AutoModelForCausalLM.from_pretrained(group / "again" / f"checkpoint-{UPDATES}")
    assert same(opened.state_dict(), weights)
    assert adapter_for(opened).heads("frozen").to_list() == events[0][2]
