"""A Trainer whose collator packs documents into one row trains each as it is alone, across an event."""

import pytest
import torch

from saf.errors import InputError, UnsupportedError
from tests.integrations.test_trainer import callback, frozen, trainer
from tests.transformers_models import LENGTH, WINDOW, make, tokens

transformers = pytest.importorskip("transformers")

SIZES = (5, 9, 12, 7, LENGTH, 4, 16, 11)


class Documents(torch.utils.data.Dataset):
    """Documents of several lengths."""

    def __init__(self, sizes=SIZES * 3):
        self.rows = [{"input_ids": tokens(1, size, seed=seed)[0].tolist()} for seed, size in enumerate(sizes)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


class PaddingFree:
    """Pack as TRL's collator for language modelling does with `padding_free`: no mask, positions of each document."""

    padding_free = True

    def __call__(self, rows):
        ids = [torch.tensor(row["input_ids"]) for row in rows]
        positions = torch.cat([torch.arange(len(one)) for one in ids])
        labels = torch.cat(ids).masked_fill(positions == 0, -100)
        return {"input_ids": torch.cat(ids)[None], "labels": labels[None], "position_ids": positions[None]}


class Counting(transformers.DataCollatorWithFlattening):
    """Count batches."""

    batches = 0

    def __call__(self, rows, **options):
        self.batches += 1
        return super().__call__(rows, **options)


class Counted(Documents):
    """Documents whose lengths are a column, as data sets have it."""

    column_names = ("input_ids", "length")

    def __getitem__(self, index):
        return [len(row["input_ids"]) for row in self.rows] if index == "length" else self.rows[index]


COLLATORS = {"flattening": transformers.DataCollatorWithFlattening, "padding_free": PaddingFree}


@pytest.mark.parametrize("collator", COLLATORS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_packed_documents_train_across_an_event_with_the_loss_of_each_alone(family, collator, hf, tmp_path):
    model, made, expected = make(family).double(), callback(), []
    options = {"remove_unused_columns": False, "save_strategy": "no"}
    run = trainer(hf, tmp_path, made, model=model, rows=Documents(), **options)
    pack = COLLATORS[collator]()
    run.data_collator = lambda rows: pack(rows) | {"documents": rows}
    compute = run.compute_loss

    def compared(model, inputs, **options):
        """Compute the loss of a packed batch, and that of its documents one by one."""
        ids = [torch.tensor([row["input_ids"]]) for row in inputs.pop("documents")]
        packed, outputs = compute(model, inputs, **options | {"return_outputs": True})
        with torch.no_grad():
            logits = [model(one, use_cache=False).logits[0] for one in ids]
        torch.testing.assert_close(outputs.logits[0].detach(), torch.cat(logits), rtol=1e-9, atol=1e-9)
        targets = torch.cat([one[0, 1:] for one in ids])
        alone = torch.nn.functional.cross_entropy(torch.cat([one[:-1] for one in logits]), targets)
        expected.append((len(frozen(model)), alone.item(), packed.item()))
        return packed

    run.compute_loss = compared
    run.train()
    assert [event.update for event in made.events] == [4]
    assert [heads for heads, *_ in expected] == [0] * 4 + [4] * 4
    alone, packed = ([each[number] for each in expected] for number in (1, 2))
    assert packed == pytest.approx(alone, rel=1e-6)  # transformers takes logits to float32 for it
    assert packed[-1] < packed[0]
    assert [each["loss"] for each in run.state.log_history if "loss" in each] == pytest.approx(packed, rel=1e-3)


LONG = (5, 9, WINDOW + 4, 7)


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_documents_longer_than_a_window_are_refused_before_training_or_at_the_first_batch(family, hf, tmp_path):
    match = rf"up to {WINDOW + 4} tokens exceed the sliding window of {WINDOW} "
    for rows, batches in ((Documents(LONG).rows, 0), (Counted(LONG), 0), (Documents(LONG), 1)):
        run = trainer(hf, tmp_path, callback(), family=family, rows=rows, remove_unused_columns=False)
        run.data_collator, reached, hooks = Counting(), [], dict(run.model._forward_pre_hooks)
        run.model.model.layers[0].register_forward_pre_hook(lambda *_, reached=reached: reached.append(1))
        with pytest.raises(UnsupportedError, match=match):
            run.train()
        assert run.data_collator.batches == batches
        assert not reached
        assert run.model._forward_pre_hooks == hooks


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_documents_within_the_window_train_across_an_event(family, hf, tmp_path):
    sizes = (3, WINDOW, 5, 7)
    run = trainer(hf, tmp_path, callback(), family=family, rows=Documents(sizes * 3).rows, remove_unused_columns=False)
    run.data_collator = transformers.DataCollatorWithFlattening()
    run.train()
    assert len(frozen(run.model)) == 4
    assert all(torch.isfinite(torch.tensor(each["loss"])) for each in run.state.log_history if "loss" in each)


def test_a_document_longer_than_the_window_trains_in_a_row_of_its_own(hf, tmp_path):
    options = {"per_device_train_batch_size": 1, "remove_unused_columns": False, "max_steps": 4}
    run = trainer(hf, tmp_path, callback(), family="gemma3", rows=Documents(LONG).rows, **options)
    run.data_collator = transformers.DataCollatorWithFlattening()
    run.train()
    assert len(frozen(run.model)) == 4


class Pieces(torch.utils.data.Dataset):
    """Rows packed beforehand, of documents of some sizes, as collators that know nothing of packing take them."""

    def __init__(self, sizes, **more):
        ids = tokens(1, sum(sizes), seed=5)[0]
        self.row = {"input_ids": ids, "labels": ids, "position_ids": torch.cat([torch.arange(size) for size in sizes])}
        self.row |= more

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return self.row


def refused(hf, folder, rows, kind, match, collator=None, **options):
    """Train and see it refused before any layer computes."""
    options = {"remove_unused_columns": False, "save_strategy": "no"} | options
    run = trainer(hf, folder, callback(), rows=rows, **options)
    run.eval_dataset = rows
    run.data_collator = collator or transformers.default_data_collator
    reached = []
    run.model.model.layers[0].register_forward_pre_hook(lambda *_: reached.append(1))
    with pytest.raises(kind, match=match):
        run.train()
    assert not reached
    assert not run.state.global_step


CHECKPOINTING = {"gradient_checkpointing": True, "use_cache": True, "eval_steps": 2}


@pytest.mark.parametrize("options", [{"use_cache": True}, CHECKPOINTING | {"eval_strategy": "steps"}])
@pytest.mark.parametrize("collator", COLLATORS)
def test_packed_documents_beside_a_cache_are_refused_before_the_first_batch(hf, tmp_path, collator, options):
    made = COLLATORS[collator]()
    match = "for one sequence: leave use_cache out of the TrainingArguments"
    refused(hf, tmp_path, Documents(), UnsupportedError, match, made, **options)


@pytest.mark.parametrize("options", [{"use_cache": True}, CHECKPOINTING | {"eval_strategy": "steps"}])
def test_rows_packed_beforehand_beside_a_cache_or_a_mask_are_refused_at_the_first_batch(hf, tmp_path, options):
    match = r"pass use_cache=False \(in a Trainer it is model.config.use_cache\)"
    refused(hf, tmp_path, Pieces((9, 7)), UnsupportedError, match, **options)
    mask = torch.ones(16, dtype=torch.long)
    refused(hf, tmp_path, Pieces((9, 7), attention_mask=mask), UnsupportedError, match, eval_strategy="no")


def test_documents_that_only_their_beginnings_tell_of_are_refused_at_the_first_batch(hf, tmp_path):
    collator = transformers.DataCollatorWithFlattening(return_position_ids=False, return_flash_attn_kwargs=True)
    refused(hf, tmp_path, Documents(), UnsupportedError, "cu_seq_lens_q tells of 4 documents", collator)


def test_documents_longer_than_the_calibration_are_refused_at_the_first_batch(hf, tmp_path):
    match = f"documents of {LENGTH + 1} tokens are longer than those of the calibration, {LENGTH}"
    refused(hf, tmp_path, Pieces((9, LENGTH + 1)), InputError, match)


@pytest.mark.parametrize("options", [{"eval_strategy": "steps", "eval_steps": 2}, CHECKPOINTING])
def test_packed_documents_are_evaluated_and_trained_where_no_pass_makes_a_cache(hf, tmp_path, options):
    """Rows of more tokens than the calibration, of shorter documents; weights stay, and so do losses between events."""
    options = {"remove_unused_columns": False, "save_strategy": "no"} | options
    run = trainer(hf, tmp_path, callback(), rows=Pieces((LENGTH, 9, LENGTH - 1)), learning_rate=0.0, **options)
    run.eval_dataset, run.data_collator = run.train_dataset, transformers.default_data_collator
    run.train()
    assert len(frozen(run.model)) == 4
    losses = [each["eval_loss"] for each in run.state.log_history if "eval_loss" in each]
    assert len(losses) == (4 if "eval_strategy" in options else 0)
    assert losses[::2] == losses[1::2]


@pytest.mark.parametrize("collator", [None, "flattening"])
def test_packed_training_beside_checkpointing_takes_an_evaluation_with_a_cache_of_one_sequence_a_row(
    collator, hf, tmp_path
):
    """transformers leaves caches out of training under checkpointing; weights stay, and so do losses between events."""
    options = {"remove_unused_columns": False, "save_strategy": "no", "eval_strategy": "steps", "learning_rate": 0.0}
    rows = Pieces((LENGTH, 9, LENGTH - 1)) if collator is None else Documents()
    plain = (
        [{"input_ids": tokens(1, LENGTH)[0], "labels": tokens(1, LENGTH)[0]}] if collator is None else Documents((9,))
    )
    losses = []
    for cache in (True, False):
        options |= CHECKPOINTING | {"use_cache": cache, "per_device_eval_batch_size": 1}
        run = trainer(hf, tmp_path, callback(), rows=rows, **options)
        run.eval_dataset = plain
        run.data_collator = transformers.default_data_collator if collator is None else COLLATORS[collator]()
        run.train()
        assert len(frozen(run.model)) == 4
        told = [(each.get("loss"), each.get("eval_loss")) for each in run.state.log_history]
        losses.append([one for pair in told for one in pair if one is not None])
    assert len(losses[0]) == 8 + 4
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
