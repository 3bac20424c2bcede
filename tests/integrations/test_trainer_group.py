"""FreezeCallback where several processes train: they freeze together, and the wrapper of gradients is made anew."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import saf
from saf.models.adapter import adapter_for
from tests.train.helpers import together
from tests.transformers_models import LENGTH, VOCAB, make

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

UPDATES = 8
RESUMES = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23)
"""transformers 5.17 loads the optimiser of several processes on a CPU to "cpu:0", which PyTorch does not know."""
FIRST_LAYER = [(0, 0), (0, 1), (0, 2), (0, 3), (1, 1)]
"""A layer without live heads, and one with some."""


def tokens(count: int, seed: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, (count, LENGTH), generator=torch.Generator().manual_seed(seed))


class Rows(torch.utils.data.Dataset):
    rows = tokens(48, 9)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Killed(transformers.TrainerCallback):
    """Stop abruptly after an update."""

    def on_step_end(self, args, state, control, **_):
        if state.global_step == 5:
            raise KeyboardInterrupt


def trained(folder, config, schedule, *, rank=0, processes=1, stopped=False, resume=False, family="llama", **options):
    """Train as many windows an update, whatever the number of processes; return Trainer and callback."""
    from saf.integrations.transformers import FreezeCallback

    # What each process would measure by itself differs: the first one's counts.
    freezing = FreezeCallback(config, [tokens(4, 1 + rank)], schedule, heldout=[tokens(2, 11 + rank)])
    settings = {
        "use_cpu": True,
        "max_steps": UPDATES,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4 // processes,
        "save_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "report_to": [],
        "disable_tqdm": True,
    }
    run = transformers.Trainer(
        make(family),
        transformers.TrainingArguments(str(folder), **settings | options),
        train_dataset=Rows(),
        eval_dataset=Rows(),
        callbacks=[freezing, *([Killed()] if stopped else [])],
    )
    try:
        run.train(resume_from_checkpoint=resume or None)
    except KeyboardInterrupt:
        assert stopped
    return run, freezing


CASES = {
    "once": (saf.FreezeConfig(count=4, max_fit_kl=99), saf.OneTime(0.5), {}),
    "layer": (
        saf.FreezeConfig(heads=FIRST_LAYER, max_fit_kl=99),
        saf.OneTime(0.5),
        # Without the search for weights that a pass leaves out: all must have a gradient, or not be waited for.
        {"family": "qwen3", "ddp_find_unused_parameters": False, "gradient_checkpointing": True},
    ),
}


def work(rank: int, folder: str) -> None:
    """Train every case, and the first one once more, killed and resumed; keep what came of it."""
    for name, (config, schedule, options) in CASES.items():
        options = options | {"rank": rank, "processes": 2}
        keep(rank, Path(folder) / name, *trained(Path(folder) / name, config, schedule, **options))
    if not RESUMES:
        return
    config, schedule, options = CASES["once"]
    options = {"rank": rank, "processes": 2}
    again = Path(folder) / "again"
    trained(again, config, schedule, stopped=True, **options)
    keep(rank, again, *trained(again, config, schedule, resume=True, **options))


def keep(rank, folder, run, freezing) -> None:
    assert type(getattr(run.model_wrapped, "_orig_mod", run.model_wrapped)).__name__ == "DistributedDataParallel"
    save_file({name: one.clone() for name, one in run.model.state_dict().items()}, folder / f"{rank}.safetensors")
    events = [(one.kind, one.update, one.heads) for one in freezing.events]
    (folder / f"{rank}.json").write_text(
        json.dumps([events, [each["loss"] for each in run.state.log_history if "loss" in each]])
    )


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    folder = tmp_path_factory.mktemp("group")
    together(2, work, str(folder))
    return folder


def told(folder, rank=0):
    return load_file(folder / f"{rank}.safetensors"), *json.loads((folder / f"{rank}.json").read_text())


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_train_and_freeze_as_one_does(name, group, tmp_path):
    config, schedule, options = CASES[name]
    run, freezing = trained(tmp_path, config, schedule, **options)
    weights, events, losses = told(group / name)
    mine = [[one.kind, one.update, one.heads] for one in freezing.events]
    assert events == json.loads(json.dumps(mine))
    assert losses == pytest.approx([each["loss"] for each in run.state.log_history if "loss" in each], rel=2e-3)
    for key, mine in run.model.named_parameters():
        torch.testing.assert_close(weights[key], mine.detach(), rtol=5e-3, atol=2e-3)


@pytest.mark.parametrize("name", [*CASES, *(["again"] if RESUMES else [])])
def test_all_processes_hold_the_same_bits(name, group):
    assert same(told(group / name)[0], told(group / name, 1)[0])
    assert told(group / name)[1] == told(group / name, 1)[1]


@pytest.mark.skipif(not RESUMES, reason="this version of transformers cannot resume several processes on a CPU")
def test_killed_and_resumed_it_ends_bit_for_bit_the_same(group):
    assert same(told(group / "again")[0], told(group / "once")[0])

    opened = transformers.AutoModelForCausalLM.from_pretrained(group / "again" / f"checkpoint-{UPDATES}")
    assert same(opened.state_dict(), told(group / "again")[0])
    assert adapter_for(opened).heads("frozen").to_list() == told(group / "once")[1][0][2]
