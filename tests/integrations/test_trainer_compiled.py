"""A Trainer that compiles refuses at its first micro-batch what frozen heads would not take, and compiles as often."""

from contextlib import nullcontext

import pytest
import torch

from saf.errors import InputError, UnsupportedError
from tests.integrations.test_trainer import callback, frozen, trainer
from tests.integrations.test_trainer_documents import Pieces
from tests.integrations.test_trainer_refusals import LONG, MASKS, Each
from tests.transformers_models import LENGTH, make

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate.utils.dataclasses")  # compiling is its work

from torch._dynamo.utils import counters  # noqa: E402

COMPILED = {"torch_compile": True, "torch_compile_backend": "eager", "save_strategy": "no"}
PACKED = r"position_ids start again .* compiled code attends to one sequence a row: leave torch_compile out, or give"
ONES = torch.ones(16, dtype=torch.long)
REFUSED = {
    "packed": (Pieces((9, 7)), UnsupportedError, PACKED),
    "packed_beside_a_mask": (Pieces((9, 7), attention_mask=ONES), UnsupportedError, PACKED),
    "packed_and_long": (Pieces((LENGTH, 9)), UnsupportedError, PACKED),
    "long": (Each(LONG), InputError, f"^rows of {LONG} tokens are longer than those of the calibration, {LENGTH}"),
    **{name: (Each(**more), kind, match) for name, (more, kind, match) in MASKS.items()},
}


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def run_of(hf, folder, rows, **options):
    """A Trainer of rows as they are, which may be longer than the calibration."""
    model = make("llama", max_position_embeddings=2 * LENGTH)
    options = COMPILED | {"remove_unused_columns": False} | options
    run = trainer(hf, folder, callback(), model=model, rows=rows, **options)
    run.data_collator = transformers.default_data_collator
    return run


@pytest.mark.parametrize("name", REFUSED)
def test_rows_that_frozen_heads_do_not_take_are_refused_at_the_first_micro_batch(name, hf, tmp_path):
    rows, kind, match = REFUSED[name]
    run = run_of(hf, tmp_path, rows, gradient_accumulation_steps=2)
    steps = []
    run.training_step = step = lambda *given: steps.append(1) or type(run).training_step(run, *given)
    with pytest.raises(kind, match=match):
        run.train()
    assert steps == [1]
    assert not run.state.global_step
    assert not counters["stats"]["unique_graphs"]
    assert vars(run).pop("training_step") is step
    assert "prediction_step" not in vars(run)
    assert not run.model._forward_pre_hooks
    assert not run.model_wrapped._forward_pre_hooks


def test_evaluations_are_looked_at_too_and_may_be_packed_where_they_are_not_compiled(hf, tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 2}
    more, kind, match = MASKS["hole"]
    run = run_of(hf, tmp_path, Each(), **options)
    run.eval_dataset = Each(**more)
    with pytest.raises(kind, match=match):
        run.train()
    assert run.state.global_step == 1
    assert not {"training_step", "prediction_step"} & vars(run).keys()
    run = run_of(hf, tmp_path, Each(), learning_rate=0.0, **options)
    run.eval_dataset = Pieces((9, 7, 20))
    run.train()
    assert len(frozen(run.model)) == 4
    assert not {"training_step", "prediction_step"} & vars(run).keys()
    losses = [each["eval_loss"] for each in run.state.log_history if "eval_loss" in each]
    assert losses[0] == losses[3] != losses[4] == losses[7]


def test_what_looks_at_passes_compiles_nothing_more(hf, tmp_path, monkeypatch):
    counted = []
    for looks in (False, True):
        with monkeypatch.context() as patch:
            if not looks:
                patch.setattr("saf.integrations.transformers.trainer.watched", lambda _: nullcontext())
            torch._dynamo.reset()
            counters.clear()
            run = run_of(hf, tmp_path, Each(), gradient_accumulation_steps=2, per_device_train_batch_size=2)
            run.train()
        assert len(frozen(run.model)) == 4
        run.evaluate()
        counted.append({kind: dict(counters[kind]) for kind in ("stats", "frames", "graph_break", "recompile_limit")})
    assert counted[0] == counted[1]
    assert counted[0]["stats"]["unique_graphs"] >= 2


def test_a_new_model_is_compiled_after_one_that_was_frozen_in_the_same_process(hf, tmp_path):
    """With the tokens themselves for labels, by which torch tells programs apart."""
    for alike in (False, True):
        run = run_of(hf, tmp_path, Each())
        if alike:
            compute = run.compute_loss
            run.compute_loss = lambda model, inputs, compute=compute, **options: compute(
                model, inputs | {"labels": inputs["input_ids"]}, **options
            )
        run.train()
        assert len(frozen(run.model)) == 4
