"""FreezeCallback: heads are frozen inside a Trainer, whose checkpoints hold everything and go on bit for bit."""

import json
import shutil
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch

import saf
from saf.adapters import adapter_for
from saf.errors import CheckpointError, InputError, UnsupportedError
from tests.transformers_models import FAMILIES, LENGTH, make, tokens

transformers = pytest.importorskip("transformers")

from saf.integrations.transformers import FreezeCallback, cache_bytes, text_sequences  # noqa: E402
from saf.integrations.transformers.sequences import sequences  # noqa: E402

CONFIG = saf.FreezeConfig(count=4, max_fit_kl=99)
UPDATES = 8


class Rows(torch.utils.data.Dataset):
    """Sequences of their own labels."""

    def __init__(self, count: int = 24, seed: int = 9):
        self.rows = tokens(count, LENGTH, seed=seed)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Killed(transformers.TrainerCallback):
    """Stop abruptly after so many updates."""

    def __init__(self, after: int):
        self.after = after

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.after:
            raise KeyboardInterrupt


def callback(schedule=None, config=CONFIG, **options):
    return FreezeCallback(config, [tokens()], schedule or saf.OneTime(0.5), **options)


def trainer(hf, folder, *callbacks, family="llama", model=None, rows=None, **options):
    settings = {
        "use_cpu": True,
        "max_steps": UPDATES,
        "per_device_train_batch_size": 4,
        "save_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "report_to": [],
        "disable_tqdm": True,
    }
    model = make(family) if model is None else model
    args = hf.TrainingArguments(str(folder), **settings | options)
    rows = Rows() if rows is None else rows
    return hf.Trainer(model, args, train_dataset=rows, eval_dataset=Rows(4, 3), callbacks=list(callbacks))


def frozen(model):
    return adapter_for(model).frozen_heads()


def same(one, other):
    """Two models with the same heads, weights and patterns, bit for bit."""
    mine, yours = one.state_dict(), other.state_dict()
    return mine.keys() == yours.keys() and all(torch.equal(mine[name], yours[name]) for name in mine)


def test_it_is_the_loop_that_freezes_by_hand(hf, tmp_path):
    rows, model = Rows(1), make("qwen3")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for update in range(6):
        if update == 3:
            report = saf.freeze_(model, [tokens()], CONFIG, optimizer=optimizer)
        model.train()
        model(rows.rows, labels=rows.rows, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    one, made = make("qwen3"), callback()
    theirs = torch.optim.AdamW(one.parameters(), lr=1e-3)
    constant = torch.optim.lr_scheduler.LambdaLR(theirs, lambda _: 1.0)
    run = trainer(hf, tmp_path, made, model=one, rows=rows, max_steps=6, max_grad_norm=0.0, save_strategy="no")
    run.optimizer, run.lr_scheduler = theirs, constant
    run.train()
    assert frozen(one) == report.heads
    assert [(event.kind, event.update, event.heads) for event in made.events] == [("freeze", 3, report.heads.to_list())]
    for mine, yours in zip(one.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, yours, rtol=1e-4, atol=1e-5)
    for weight, _ in adapter_for(one).sites()[0].projections().values():
        assert theirs.state[weight]["exp_avg"].shape == weight.shape


SCHEDULES = {
    "one_time": saf.OneTime(0.5),
    "gradual": saf.Gradual(begin=3, end=5, groups=2),
    "undone": saf.ValidationBudget(budget=0.0, begin=4, every=3),
    "train_loss": saf.TrainLoss(),
}


RESUMED = [
    *((schedule, "llama", 3 if schedule == "one_time" else 1) for schedule in SCHEDULES),
    *(("one_time", family, 2) for family in FAMILIES if family != "llama"),
]
"""Schedule, family, and how often training is killed: before an event, after it, long before it."""


@pytest.mark.parametrize(("schedule", "family", "times"), RESUMED)
def test_killed_and_resumed_it_ends_bit_for_bit_the_same(schedule, family, times, hf, tmp_path):
    options = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "family": family}
    # Their loss rises by freezing, in the order in which accelerate shuffles rows and in that of its stand-in.
    heldout = {"heldout": [tokens(2, seed=11)]}
    first = callback(SCHEDULES[schedule], **heldout)
    whole = trainer(hf, tmp_path / "whole", first, **options)
    whole.train()
    events = first.events
    kinds = {"one_time": ["freeze"], "gradual": ["freeze"] * 2, "undone": ["freeze", "undo"] * 2, "train_loss": []}
    assert [event.kind for event in events] == kinds[schedule]
    assert len(frozen(whole.model)) == (4 if schedule in ("one_time", "gradual") else 0)
    for after in (5, 7, 3)[:times]:
        folder = tmp_path / str(after)
        with pytest.raises(KeyboardInterrupt):
            trainer(hf, folder, callback(SCHEDULES[schedule], **heldout), Killed(after), **options).train()
        again = trainer(hf, folder, made := callback(SCHEDULES[schedule], **heldout), **options)
        again.train(resume_from_checkpoint=True)
        assert again.state.global_step == UPDATES
        assert same(again.model, whole.model), after
        assert [(one.kind, one.update, one.heads) for one in made.events] == [
            (one.kind, one.update, one.heads) for one in events
        ]
        state = json.loads((folder / f"checkpoint-{UPDATES}" / "trainer_state.json").read_text())
        kept = [state["stateful_callbacks"]["FreezeCallback"], made.state(), first.state()]
        schedules = [one["attributes"]["progress"]["schedule"] for one in kept]
        assert schedules[0] == schedules[1]
        assert schedules[1] == schedules[2]


@pytest.mark.parametrize("length", [LENGTH, 160])
def test_exponential_patterns_resume_bit_for_bit(length, hf, tmp_path):
    """Within the band, where they have no poles, and beyond it."""
    config, rows = saf.FreezeConfig(count=4, storage="exponential", max_fit_kl=99), Rows()
    rows.rows = tokens(24, length, seed=9)

    def run(folder, *callbacks):
        model = make("llama-grouped", max_position_embeddings=length)
        freezing = FreezeCallback(config, [tokens(4, length)], saf.OneTime(0.5))
        return trainer(hf, tmp_path / folder, freezing, *callbacks, model=model, rows=rows)

    whole = run("whole")
    whole.train()
    with pytest.raises(KeyboardInterrupt):
        run("killed", Killed(7)).train()
    again = run("killed")
    again.train(resume_from_checkpoint=True)
    assert same(again.model, whole.model)
    patterns = [one for site in adapter_for(again.model).sites() if site.frozen for one in site.frozen.patterns]
    assert {one.kind for one in patterns} == {"exponential"}


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_checkpoints_open_and_gradient_checkpointing_changes_nothing(family, hf, tmp_path):
    run = trainer(hf, tmp_path / "one", callback(), family=family)
    run.train()
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "one" / f"checkpoint-{UPDATES}")
    assert same(saved, run.model)
    assert len(frozen(saved)) == 4
    assert "after update 4" in (tmp_path / "one" / f"checkpoint-{UPDATES}" / "README.md").read_text()
    before = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "one" / "checkpoint-4")
    assert not len(frozen(before))
    lean = trainer(hf, tmp_path / "two", callback(), family=family, gradient_checkpointing=True)
    lean.train()
    assert same(lean.model, run.model)


EXECUTIONS = {
    "compiled": ({"torch_compile": True, "torch_compile_backend": "eager"}, 1e-4),
    "bf16": ({"bf16": True}, 0.05),
}


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_compiled_or_in_bf16_it_freezes_the_same_heads_and_loses_the_same(execution, hf, tmp_path):
    pytest.importorskip("accelerate.utils.dataclasses")  # these are its work
    options, tolerance = EXECUTIONS[execution]
    schedule, few = saf.Gradual(begin=2, end=4, groups=2), {"max_steps": 6, "save_strategy": "no"}
    plain, run = (trainer(hf, tmp_path, callback(schedule), **few | some) for some in ({}, options))
    for each in (plain, run):
        each.train()
    assert frozen(run.model) == frozen(plain.model)
    losses = [[entry["loss"] for entry in each.state.log_history if "loss" in entry] for each in (plain, run)]
    assert len(losses[0]) == 6
    assert losses[1] == pytest.approx(losses[0], rel=tolerance)
    if run.args.torch_compile:
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
        assert not torch._dynamo.utils.counters["recompile_limit"]


@pytest.mark.parametrize("last", [True, False])
def test_the_best_model_comes_with_its_own_heads(last, hf, tmp_path):
    options = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2, "save_total_limit": 2}
    run = trainer(hf, tmp_path, callback(), greater_is_better=not last, **options)
    run.train()
    best = run.state.best_global_step
    assert (best == 2) is not last
    assert len(frozen(run.model)) == (4 if best > 4 else 0)
    saved = transformers.AutoModelForCausalLM.from_pretrained(run.state.best_model_checkpoint)
    assert same(saved, run.model)
    run.evaluate()


def test_it_goes_on_from_ordinary_training_and_a_frozen_model_trains_without_it(hf, tmp_path):
    trainer(hf, tmp_path, max_steps=4).train()
    made = callback(saf.OneTime(6))
    run = trainer(hf, tmp_path, made, max_steps=UPDATES)
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert [event.update for event in made.events] == [6]
    later = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / f"checkpoint-{UPDATES}")
    on = trainer(hf, tmp_path / "on", model=later, max_steps=4)
    on.train()
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "on" / "checkpoint-2")
    more = trainer(hf, tmp_path / "on", model=again, max_steps=4)
    more.train(resume_from_checkpoint=str(tmp_path / "on" / "checkpoint-2"))
    assert same(more.model, on.model)
    assert frozen(more.model) == frozen(run.model)


def test_heads_are_pruned_where_the_settings_say_so(hf, tmp_path):
    made = callback(config=saf.FreezeConfig(count=3, operation="prune"))
    run = trainer(hf, tmp_path, made, max_steps=4)
    run.train()
    assert [event.kind for event in made.events] == ["prune"]
    assert len(adapter_for(run.model).heads("pruned")) == 3
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    assert same(saved, run.model)
    assert "3 heads pruned by variance; after update 2" in (tmp_path / "checkpoint-4" / "README.md").read_text()


def test_the_last_update_may_be_the_moment(hf, tmp_path):
    run = trainer(hf, tmp_path, callback(saf.OneTime(1.0)), max_steps=4)
    run.train()
    assert len(frozen(run.model)) == 4
    assert len(frozen(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4"))) == 4


def test_what_cannot_work_is_refused_before_training(hf, tmp_path, monkeypatch):
    def refuses(kind, match, made, **options):
        with pytest.raises(kind, match=match):
            trainer(hf, tmp_path / "run", made, **options).train()
        assert not (tmp_path / "run").exists() or not list((tmp_path / "run").iterdir())

    refuses(InputError, "give them as heldout=", callback(saf.ValidationBudget()))
    refuses(InputError, "set logging_steps=1", callback(saf.TrainLoss()), logging_steps=2)
    refuses(UnsupportedError, "an average over updates", callback(config=saf.FreezeConfig(score="qk_gradient")))
    refuses(UnsupportedError, "leave trainable out", callback(config=saf.FreezeConfig(trainable=True)))
    refuses(UnsupportedError, "makes callbacks anew", callback(), restore_callback_states_from_checkpoint=True)
    refuses(InputError, r"an update in \[0, 8\]; got 20", callback(saf.OneTime(20)))
    refuses(InputError, r"heads must exist, .*got \[\(9, 0\)\]", callback(config=saf.FreezeConfig(heads=((9, 0),))))
    refuses(InputError, "must have two different ones, got 1", FreezeCallback(CONFIG, [tokens()[:1]]))
    refuses(InputError, "count must be at most the 12 live heads", callback(config=saf.FreezeConfig(count=99)))
    windowed = callback(config=saf.FreezeConfig(heads=((3, 1),)))
    refuses(UnsupportedError, "layer 3 attends within a sliding window", windowed, family="gemma3")
    labels = transformers.LlamaForSequenceClassification(make("llama").config)
    for made in (callback(heldout=[tokens()]), callback(config=saf.FreezeConfig(score="gate_taylor"))):
        refuses(UnsupportedError, "predicts no next tokens", made, model=labels)
    dropping = make("llama", attention_dropout=0.1)
    refuses(UnsupportedError, "no attention dropout", callback(), model=dropping)
    refuses(UnsupportedError, "train with bf16=True", callback(), fp16=True)
    refuses(UnsupportedError, "Adafactor keeps 'exp_avg_sq_row'", callback(), optim="adafactor", save_steps=1)
    for packing in (transformers.DataCollatorWithFlattening(), SimpleNamespace(padding_free=True)):
        packed = trainer(hf, tmp_path / "run", callback(), torch_compile=True, torch_compile_backend="eager")
        packed.data_collator = packing
        with pytest.raises(UnsupportedError, match=r"packs documents into one row.*leave torch_compile out"):
            packed.train()
    several = {"world_size": 2, "n_gpu": 1, "fp16": False}
    for changes, match in (
        ({"n_gpu": 2}, "a process for each GPU"),
        ({"deepspeed": "settings.json"}, "a share of each weight"),
        ({"fsdp": ["full_shard"]}, "a share of each weight"),
    ):
        with pytest.raises(UnsupportedError, match=match):
            callback().on_init_end(SimpleNamespace(**several | changes), None, None)
    monkeypatch.setattr("saf.integrations.transformers.trainer.group_place", lambda: (1, 2))
    with pytest.raises(UnsupportedError, match="pass use_cpu=True where they are to train together"):
        callback().on_init_end(SimpleNamespace(**several | {"world_size": 1}), None, None)
    own = SimpleNamespace(
        name="own", chooses_once=True, several_events=False, first_update=int, start=saf.OneTime(0.5).start
    )
    assert FreezeCallback(CONFIG, [tokens()], own).schedule is own
    with pytest.raises(InputError, match=r"calibration must be token tensors.*got None"):
        FreezeCallback(CONFIG, None)
    with pytest.raises(InputError, match=r"expected a cache of transformers.*got 3"):
        cache_bytes(3)
    with pytest.raises(InputError, match="length is a whole number from 1; got 0"):
        callback(length=0)
    with pytest.raises(InputError, match="batch_size is a whole number from 1"):
        callback(batch_size=0)


def test_another_setting_and_damaged_files_stop_a_resumption(hf, tmp_path):
    trainer(hf, tmp_path, callback()).train()
    with pytest.raises(InputError, match="other settings of FreezeCallback"):
        trainer(hf, tmp_path, callback(config=saf.FreezeConfig(count=3))).train(resume_from_checkpoint=True)
    shutil.copy(tmp_path / "checkpoint-6" / "model.safetensors", tmp_path / f"checkpoint-{UPDATES}" / "saf.safetensors")
    with pytest.raises(CheckpointError, match=r"saf\.safetensors is damaged"):
        trainer(hf, tmp_path, callback()).train(resume_from_checkpoint=True)


class Tokenizer:
    """A number for each word."""

    eos_token_id = 2

    def __call__(self, text, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [int(word) for word in text.split()]}


def test_sequences_come_as_tensors_rows_or_text():
    ids = tokens(5, 8)
    cut = {"tokenizer": Tokenizer(), "length": None, "count": 4, "batch_size": 2, "name": "calibration"}
    assert torch.equal(torch.cat(sequences([ids[:3], {"input_ids": ids[3:]}], **cut)), ids)
    for rows in (list(ids), [{"input_ids": row.tolist(), "attention_mask": [1] * 8, "labels": []} for row in ids]):
        found = sequences(rows, **cut)
        assert [len(batch) for batch in found] == [2, 2, 1]
        assert torch.equal(torch.cat(found), ids)
    text = [" ".join(map(str, range(3, 18))), " ".join(map(str, range(20, 40)))]
    found = torch.cat(sequences(text, **cut | {"length": 8}))
    assert found.flatten().tolist() == [*range(3, 18), 2, *range(20, 36)]
    for given, changes, match in (
        (text, {"tokenizer": None, "length": 8}, "give the model's tokenizer"),
        (text, {}, "say with length="),
        (text, {"length": 40}, "has 37 tokens, 4 sequences of 40 need 160"),
        ([text[0], ids], {"length": 8}, "texts beside tokens"),
        ([ids], {"length": 8}, "8 would have no effect"),
        (text[0], {"length": 8}, "one by itself"),
        ([ids[0], ids[1, :4]], {}, "must have one length"),
        ([{"input_ids": ids[0].tolist(), "attention_mask": [1] * 7 + [0]}], {}, "must not be padded"),
        ([{"input_ids": ids[0].tolist(), "attention_mask": [0] + [1] * 7}], {}, "pad on the right"),
        *(
            ([{"input_ids": ids[0], **told}], {}, "several documents in a row")
            for told in (
                {"position_ids": [*range(3), *range(5)]},
                {"cu_seq_lens_q": [0, 3, 8]},
                {"seq_lengths": [3, 5]},
            )
        ),
    ):
        with pytest.raises(InputError, match=match):
            sequences(given, **cut | changes)


def test_text_is_tokenised_by_the_trainers_tokenizer(hf, tmp_path):
    words = [" ".join(str(3 + (7 * place) % 50) for place in range(start, start + 300)) for start in (0, 11)]
    made = FreezeCallback(CONFIG, words, length=LENGTH, sequences=8, tokenizer=Tokenizer())
    run = trainer(hf, tmp_path, made, max_steps=2, save_strategy="no")
    run.train()
    assert len(frozen(run.model)) == 4


class Hub:
    """A hub in a folder: it keeps what a Trainer sends, each time anew."""

    def __init__(self, folder):
        self.folder = folder
        self.opened = []
        """The frozen heads of what was sent, each time."""

    def __call__(self):
        return self

    def create_repo(self, name, **_):
        return SimpleNamespace(repo_id=name)

    def upload_folder(self, *, folder_path, ignore_patterns, **_):
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(folder_path, self.folder, ignore=shutil.ignore_patterns(*ignore_patterns))
        self.opened.append(len(frozen(self.open())))
        done = Future()
        done.set_result(None)
        return done

    def open(self):
        return transformers.AutoModelForCausalLM.from_pretrained(self.folder)

    def card(self):
        return (self.folder / "README.md").read_text()


@pytest.fixture
def hub(hf, tmp_path, monkeypatch):
    """The hub that Trainers send to."""
    made = Hub(tmp_path / "hub")
    monkeypatch.setattr("transformers.trainer.hf_api", made)
    return made


PUSHES = {"push_to_hub": True, "hub_model_id": "me/frozen", "hub_always_push": True}


def test_what_a_trainer_pushes_has_the_files_about_heads_and_its_card_their_section(hf, hub, tmp_path):
    folder = tmp_path / "run"
    made = trainer(hf, folder, callback(), **PUSHES)
    made.train()
    assert hub.opened == [0, 0, 4, 4]
    assert same(hub.open(), made.model)
    for step, there in ((2, False), (6, True), (2, False), (8, True)):
        made._push_from_checkpoint(str(folder / f"checkpoint-{step}"))
        assert [(hub.folder / name).is_file() for name in ("saf.json", "saf.safetensors")] == [there] * 2
        assert hub.opened[-1] == (4 if there else 0)
        assert hub.card().count("## Frozen attention heads") == there
    made.push_to_hub()
    assert "generated_from_trainer" in hub.card()
    assert hub.card().count("## Frozen attention heads") == 1
    assert same(made.model, hub.open())


def test_a_frozen_model_is_pushed_whole_by_a_trainer_that_has_no_callback_for_it(hf, hub, tmp_path):
    trainer(hf, tmp_path / "first", callback(), max_steps=4).train()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "first" / "checkpoint-4")
    folder = tmp_path / "on"
    run = trainer(hf, folder, model=model, max_steps=4, **PUSHES)
    (folder / "README.md").write_text("# Mine\n")
    run.train()
    assert hub.opened == [4, 4]
    assert same(hub.open(), run.model)
    assert hub.card().startswith("# Mine\n")
    assert hub.card().count("## Frozen attention heads") == 1
    run.push_to_hub()
    assert "generated_from_trainer" in hub.card()
    assert hub.card().count("## Frozen attention heads") == 1
    # A checkpoint of peft has no model of its own to write over the folder's.
    (tmp_path / "adapters").mkdir()
    run._push_from_checkpoint(str(tmp_path / "adapters"))
    assert same(hub.open(), run.model)
    # Where a checkpoint is not pushed, the folder stays as it was last.
    run.args.hub_always_push, run.push_in_progress = False, SimpleNamespace(is_done=lambda: False)
    (folder / "saf.json").write_text("of now")
    run._push_from_checkpoint(str(folder / "checkpoint-2"))
    assert (folder / "saf.json").read_text() == "of now"
    assert len(hub.opened) == 4


def test_text_becomes_sequences_for_a_loop_of_ones_own():
    def tokenizer(text, **options):
        assert options == {"add_special_tokens": False}
        return {"input_ids": [ord(letter) % 60 for letter in text]}

    tokenizer.eos_token_id = 60
    batches = text_sequences(["a text", "another one"] * 9, tokenizer, length=LENGTH, count=3, batch_size=2)
    assert [list(batch.shape) for batch in batches] == [[2, LENGTH], [1, LENGTH]]
    assert len(saf.freeze_(make("llama"), batches, CONFIG).heads) == 4
    cut = {"length": LENGTH, "count": 3, "batch_size": 2, "bos": True}
    tokenizer.bos_token_id = None
    with pytest.raises(InputError, match=r"tokenizer of texts has no token that begins a text \(BOS\); leave bos out"):
        text_sequences(["a text"] * 18, tokenizer, **cut)
    tokenizer.bos_token_id = 5
    begun = torch.cat(text_sequences(["a text", "another one"] * 9, tokenizer, **cut))
    assert begun[:, 0].tolist() == [5] * 3
    assert torch.equal(begun[:, 1:].flatten(), torch.cat(batches).flatten()[: 3 * (LENGTH - 1)])
