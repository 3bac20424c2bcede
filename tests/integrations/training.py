"""A Trainer of transformers on a small model, and a hub in a folder."""

import shutil
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import saf
from saf.models.adapter import adapter_for
from tests.transformers_models import make, tokens

transformers = pytest.importorskip("transformers")

import saf.integrations.transformers  # noqa: E402, for `opened`

UPDATES = 8
CONFIG = saf.FreezeConfig(count=4, max_fit_kl=99)


class Killed(transformers.TrainerCallback):
    """Stop abruptly after so many updates."""

    def __init__(self, after: int):
        self.after = after

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.after:
            raise KeyboardInterrupt


def trainer(folder, *callbacks, family="llama", model=None, rows=None, **options):
    """Return a Trainer of eight updates with a checkpoint after every second one."""
    settings = {"use_cpu": True, "max_steps": UPDATES, "per_device_train_batch_size": 4, "save_steps": 2}
    settings |= {"logging_steps": 1, "learning_rate": 1e-2, "report_to": [], "disable_tqdm": True}
    args = transformers.TrainingArguments(str(folder), **settings | options)
    train, evaluation = tokens(48, seed=9) if rows is None else rows, tokens(4, seed=3)
    options = {"train_dataset": labelled(train), "eval_dataset": labelled(evaluation)}
    return transformers.Trainer(make(family) if model is None else model, args, callbacks=list(callbacks), **options)


def labelled(ids):
    """Return sequences as their own labels."""
    return [{"input_ids": row, "labels": row} for row in ids]


def frozen(model):
    return adapter_for(model).heads("frozen")


def opened(*path, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(Path(*path), **options)


def same(one, other):
    """Return whether two models, or their states, have the same weights and heads, bit for bit."""
    mine, yours = (each if isinstance(each, dict) else each.state_dict() for each in (one, other))
    return mine.keys() == yours.keys() and all(torch.equal(mine[name], yours[name]) for name in mine)


class Hub:
    """A hub in a folder, which holds the files that a model or a Trainer sends."""

    def __init__(self, folder):
        self.folder = folder
        self.frozen: list[int] = []
        """Number of frozen heads of each model that a Trainer sent."""

    def __call__(self):
        return self

    @property
    def card(self):
        return (self.folder / "README.md").read_text()

    def create_repo(self, name, **_):
        return SimpleNamespace(repo_id=name)

    def create_commit(self, *, operations, **_):
        self.folder.mkdir(exist_ok=True)
        for each in operations:
            shutil.copy(each.path_or_fileobj, self.folder / each.path_in_repo)

    def upload_folder(self, *, folder_path, ignore_patterns, **_):
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(folder_path, self.folder, ignore=shutil.ignore_patterns(*ignore_patterns))
        self.frozen.append(len(frozen(opened(self.folder))))
        done = Future()
        done.set_result(None)
        return done
