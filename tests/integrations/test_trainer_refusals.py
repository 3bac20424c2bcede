"""A Trainer refuses before it trains what frozen heads would not take, and nothing that ordinary heads alone meet."""

import pytest
import torch

import saf
from saf.errors import InputError, UnsupportedError
from saf.integrations.transformers import FreezeCallback
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


def test_tokens_that_the_model_does_not_know_are_refused_before_training(hf, tmp_path):
    unknown = torch.full((2, LENGTH), 5_000)
    for freezing in (FreezeCallback(CONFIG, [unknown]), callback(heldout=[unknown])):
        run = trainer(hf, tmp_path, freezing, save_strategy="no")
        with pytest.raises(InputError, match=r"token ids of batches must lie in \[0, .*\); got 5000"):
            run.train()
        assert not run.state.global_step


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


def loss_of(trainer, compute):
    """Let a Trainer compute its loss by `compute(model, inputs)`, which returns logits, as a subclass would."""

    def compute_loss(model, inputs, **_):
        logits = compute(model, inputs)
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())

    trainer.compute_loss = compute_loss
    return trainer


def in_halves(model, inputs):
    """Go on after a first half by its cache, with a mask of all tokens so far and the positions of the second one."""
    one, two = inputs["input_ids"].chunk(2, dim=1)
    first = model(one, use_cache=True)
    told = {"attention_mask": torch.ones_like(inputs["input_ids"]), "position_ids": torch.arange(LENGTH)[None]}
    told["position_ids"] = told["position_ids"][:, one.shape[1] :].expand(len(two), -1)
    second = model(two, past_key_values=first.past_key_values, **told)
    return torch.cat([first.logits, second.logits], dim=1)


def test_a_pass_that_goes_on_by_a_cache_trains_across_an_event(hf, tmp_path):
    losses = []
    for compute in (in_halves, lambda model, inputs: model(inputs["input_ids"], use_cache=False).logits):
        run = loss_of(trainer(hf, tmp_path, callback(), model=make("llama"), save_strategy="no"), compute)
        run.train()
        assert len(frozen(run.model)) == 4
        losses.append([each["loss"] for each in run.state.log_history if "loss" in each])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("cache", [True, False])
def test_what_a_pass_says_of_a_cache_counts_before_what_the_configuration_says(cache, hf, tmp_path):
    positions = torch.cat([torch.arange(9), torch.arange(LENGTH - 9)])

    def compute(model, inputs):
        return model(inputs["input_ids"], position_ids=inputs["position_ids"], use_cache=cache).logits

    options = {"save_strategy": "no", "use_cache": not cache}
    run = loss_of(trainer(hf, tmp_path, callback(), rows=Each(position_ids=positions), **options), compute)
    if cache:
        with pytest.raises(UnsupportedError, match="start again within a row"):
            run.train()
    else:
        run.train()
    assert run.state.global_step == (0 if cache else UPDATES)


WAYS = {
    "by_place": (hole(), LENGTH, lambda model, inputs: model(inputs["input_ids"], inputs["attention_mask"])),
    "embedded": (None, LONG, lambda model, inputs: model(inputs_embeds=model.model.embed_tokens(inputs["input_ids"]))),
    "evaluating": (hole(), LENGTH, lambda model, inputs: model.eval()(**inputs)),
}


@pytest.mark.parametrize("way", WAYS)
def test_passes_are_looked_at_however_a_trainer_calls_the_model(way, hf, tmp_path):
    mask, length, compute = WAYS[way]
    more = {} if mask is None else {"attention_mask": mask}
    run = trainer(
        hf, tmp_path, callback(), model=make("llama", max_position_embeddings=LONG), rows=Each(length, **more)
    )
    with pytest.raises(InputError):
        loss_of(run, lambda model, inputs: compute(model, inputs).logits).train()
    assert not run.state.global_step
    assert not {"training_step", "prediction_step"} & vars(run).keys()
