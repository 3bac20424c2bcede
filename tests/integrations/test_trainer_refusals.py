"""A Trainer refuses before it trains what frozen heads would not take, and nothing that ordinary heads alone meet."""

import pytest
import torch

import saf
from saf.errors import InputError, UnsupportedError
from tests.integrations.test_trainer import CONFIG, UPDATES, Rows, callback, frozen, trainer
from tests.transformers_models import LENGTH, make, tokens

transformers = pytest.importorskip("transformers")

LONG = LENGTH + 8


class Each(torch.utils.data.Dataset):
    """The same row again and again."""

    def __init__(self, length: int = LENGTH, **more):
        ids = tokens(1, length)[0]
        self.row = {"input_ids": ids, "labels": ids, **more}

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return self.row


def hole():
    mask = torch.ones(LENGTH, dtype=torch.long)
    mask[5:8] = 0
    return mask


PAIRS = torch.ones(1, LENGTH, LENGTH, dtype=torch.bool).tril()
MASKS = {
    "hole": ({"attention_mask": hole()}, InputError, "padding at the ends of each row only"),
    "pairs": ({"attention_mask": PAIRS}, UnsupportedError, r"no mask but of padding, \[B, T\]; got \[4, 1, 32, 32\]"),
    "pairs_beside_positions": (
        {"attention_mask": PAIRS, "position_ids": torch.arange(LENGTH)},
        UnsupportedError,
        "no mask but of padding",
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_that_frozen_heads_do_not_take_are_refused_at_the_first_batch(name, hf, tmp_path):
    more, kind, match = MASKS[name]
    run = trainer(hf, tmp_path, callback(), rows=Each(**more), save_strategy="no")
    with pytest.raises(kind, match=match):
        run.train()
    assert not run.state.global_step
    pruned = callback(config=saf.FreezeConfig(count=4, operation="prune"))
    with pytest.raises(kind, match=match):
        trainer(hf, tmp_path, pruned, rows=Each(**more), save_strategy="no").train()


def test_held_out_sequences_longer_than_the_calibration_are_refused_before_training(hf, tmp_path):
    match = rf"^heldout: sequences of {LENGTH + 1} tokens are longer than those of the calibration, {LENGTH}, which"
    options = {"model": make("llama", max_position_embeddings=LONG), "save_strategy": "no"}
    run = trainer(hf, tmp_path, callback(heldout=[tokens(2, LENGTH + 2)]), **options)
    with pytest.raises(InputError, match=match):
        run.train()
    assert not run.state.global_step
    trainer(hf, tmp_path, callback(heldout=[tokens(2, LENGTH + 1)]), **options).train()
    assert len(frozen(options["model"])) == 4


ORDINARY = {
    "nothing_is_frozen": ({"config": saf.FreezeConfig(rate=0.0)}, {"eval_strategy": "steps", "eval_steps": 4}),
    "after_the_last_update": ({"schedule": saf.OneTime(1.0)}, {}),
    "evaluated_at_the_start": ({"schedule": saf.OneTime(1.0)}, {"eval_on_start": True}),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_what_ordinary_heads_alone_meet_is_not_refused(name, hf, tmp_path):
    given, options = ORDINARY[name]
    made, model = callback(**{"config": CONFIG, **given}), make("llama", max_position_embeddings=LONG)
    run = trainer(hf, tmp_path, made, model=model, rows=Each(LONG), save_strategy="no", **options)
    run.eval_dataset = [Each(LONG)[0]]
    run.train()
    assert run.state.global_step == UPDATES
    assert len(frozen(model)) == (0 if name == "nothing_is_frozen" else 4)


def test_rows_of_an_evaluation_at_the_start_may_be_longer_and_those_at_the_end_may_not(hf, tmp_path):
    def run(**options):
        model = make("llama", max_position_embeddings=LONG)
        made = trainer(hf, tmp_path, callback(), model=model, rows=Rows(), save_strategy="no", **options)
        made.eval_dataset = [Each(LONG)[0]]
        made.train()
        return made

    assert len(frozen(run(eval_on_start=True).model)) == 4
    with pytest.raises(InputError, match=f"in evaluations rows of {LONG} tokens"):
        run(eval_strategy="steps", eval_steps=3)


def test_documents_beside_a_cache_are_packed_where_no_head_is_frozen(hf, tmp_path):
    made = callback(config=saf.FreezeConfig(count=0))
    rows = [{"input_ids": tokens(1, 5 + seed, seed=seed)[0].tolist()} for seed in range(8)]
    run = trainer(hf, tmp_path, made, rows=rows, save_strategy="no", use_cache=True, max_steps=2)
    run.data_collator = transformers.DataCollatorWithFlattening()
    run.train()
    assert run.state.global_step == 2
