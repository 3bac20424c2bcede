"""FreezeCallback: heads are frozen inside a Trainer, whose checkpoints hold everything and go on bit for bit."""

import shutil
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch

import saf
from saf.errors import CheckpointError, InputError, UnsupportedError
from saf.models.adapter import adapter_for
from tests.transformers_models import LENGTH, make, tokens

transformers = pytest.importorskip("transformers")

from saf.hf.sequences import sequences  # noqa: E402
from saf.integrations.transformers import FreezeCallback, cache_bytes  # noqa: E402

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
    "one_time": (saf.OneTime(0.5), ["freeze"]),
    "gradual": (saf.Gradual(begin=3, end=5, groups=2), ["freeze"] * 2),
    "undone": (saf.ValidationBudget(budget=0.0, begin=4, every=3), ["freeze", "undo"] * 2),
    "train_loss": (saf.TrainLoss(), []),
}


@pytest.mark.parametrize(
    ("schedule", "family"), [*((name, "llama") for name in SCHEDULES), ("one_time", "gpt2"), ("one_time", "gemma3")]
)
def test_killed_and_resumed_it_ends_bit_for_bit_the_same(schedule, family, hf, tmp_path):
    options = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "family": family}
    when, kinds = SCHEDULES[schedule]

    def made():
        return callback(when, heldout=[tokens(2, seed=11)])  # whose loss rises by freezing

    whole = trainer(hf, tmp_path / "whole", first := made(), **options)
    whole.train()
    assert [event.kind for event in first.events] == kinds
    for after in (3, 7) if schedule == "one_time" and family == "llama" else (5,):
        folder = tmp_path / str(after)
        with pytest.raises(KeyboardInterrupt):
            trainer(hf, folder, made(), Killed(after), **options).train()
        again = trainer(hf, folder, resumed := made(), **options)
        again.train(resume_from_checkpoint=True)
        assert same(again.model, whole.model), after
        mine, yours = ([(one.kind, one.update, one.heads) for one in each.events] for each in (resumed, first))
        assert mine == yours
        states = [each.state()["attributes"]["progress"]["schedule"] for each in (resumed, first)]
        assert states[0] == states[1]


def test_exponential_patterns_resume_bit_for_bit(hf, tmp_path):
    length = 160
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


@pytest.mark.parametrize("family", ["qwen3"])
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


@pytest.mark.parametrize("execution", [pytest.param("compiled", marks=pytest.mark.slow), "bf16"])
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


def test_heads_are_pruned_after_the_last_update_where_the_settings_say_so(hf, tmp_path):
    made = callback(saf.OneTime(1.0), config=saf.FreezeConfig(count=3, operation="prune"))
    run = trainer(hf, tmp_path, made, max_steps=4)
    run.train()
    assert [event.kind for event in made.events] == ["prune"]
    assert len(adapter_for(run.model).heads("pruned")) == 3
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    assert same(saved, run.model)
    assert "3 heads pruned by variance; after update 4" in (tmp_path / "checkpoint-4" / "README.md").read_text()


PIECES = torch.cat([torch.arange(9), torch.arange(LENGTH - 9)])


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_packed_documents_train_across_an_event(family, hf, tmp_path):
    rows = [{"input_ids": row, "labels": row, "position_ids": PIECES} for row in tokens(24, seed=9)]
    losses = []
    for alike in (False, True):
        run = trainer(hf, tmp_path, callback(), family=family, rows=rows, save_strategy="no")
        run.data_collator = transformers.default_data_collator
        if alike:  # the documents one by one
            run.compute_loss = lambda model, inputs, **_: loss_of_parts(model, inputs["input_ids"])
        else:
            run.compute_loss = lambda model, inputs, **_: loss_of(
                model(inputs["input_ids"], position_ids=inputs["position_ids"], use_cache=False).logits,
                inputs["input_ids"],
            )
        run.train()
        assert len(frozen(run.model)) == 4
        losses.append([each["loss"] for each in run.state.log_history if "loss" in each])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def loss_of_parts(model, ids):
    return loss_of(torch.cat([model(part, use_cache=False).logits for part in ids.split([9, LENGTH - 9], 1)], 1), ids)


def loss_of(logits, ids):
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


REFUSED = {
    "heldout": (InputError, lambda: callback(saf.ValidationBudget()), {}),
    "budget": (InputError, lambda: callback(config=saf.FreezeConfig(budget=0.1)), {}),
    "logging": (InputError, lambda: callback(saf.TrainLoss()), {"logging_steps": 2}),
    "gradient": (UnsupportedError, lambda: callback(config=saf.FreezeConfig(score="qk_gradient")), {}),
    "trainable": (UnsupportedError, lambda: callback(config=saf.FreezeConfig(trainable=True)), {}),
    "update": (InputError, lambda: callback(saf.OneTime(20)), {}),
    "head": (InputError, lambda: callback(config=saf.FreezeConfig(heads=((9, 0),))), {}),
    "copies": (InputError, lambda: FreezeCallback(CONFIG, [tokens()[:1]]), {}),
    "count": (InputError, lambda: callback(config=saf.FreezeConfig(count=99)), {}),
    "rows": (InputError, lambda: FreezeCallback(CONFIG, [tokens()[:, :7]]), {}),
    "window": (UnsupportedError, lambda: callback(config=saf.FreezeConfig(heads=((3, 1),))), {"family": "gemma3"}),
    "fp16": (UnsupportedError, callback, {"fp16": True}),
    "states": (UnsupportedError, callback, {"restore_callback_states_from_checkpoint": True}),
    "optimiser": (UnsupportedError, callback, {"optim": "adafactor", "save_steps": 1}),
    "dropout": (UnsupportedError, callback, {"model": lambda: make("llama", attention_dropout=0.1)}),
    "labels": (
        UnsupportedError,
        lambda: callback(heldout=[tokens()]),
        {"model": lambda: transformers.LlamaForSequenceClassification(make("llama").config)},
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_before_training(case, hf, tmp_path):
    kind, made, options = REFUSED[case]
    model = options["model"]() if "model" in options else None
    with pytest.raises(kind):
        trainer(hf, tmp_path / "run", made(), **options | {"model": model}).train()
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").iterdir())


def test_rows_that_a_collator_cuts_and_evaluations_that_never_come_may_be_longer(hf, tmp_path):
    short = saf.FreezeConfig(count=1, max_fit_kl=99)
    made = FreezeCallback(short, [tokens()[:, :20]], saf.OneTime(1))
    run = trainer(hf, tmp_path, made, max_steps=2)
    run.data_collator = lambda rows: {name: torch.stack([row[name][:20] for row in rows]) for name in rows[0]}
    run.train()
    assert len(frozen(run.model)) == 1
    run = trainer(hf, tmp_path, FreezeCallback(short, [tokens()], saf.OneTime(1)), max_steps=2)
    run.eval_dataset = [{"input_ids": torch.zeros(2 * LENGTH, dtype=torch.long)}]
    run.train()
    assert len(frozen(run.model)) == 1


def test_two_callbacks_shares_and_wrong_arguments_are_refused(hf, tmp_path):
    with pytest.raises(InputError, match="one FreezeCallback"):
        trainer(hf, tmp_path, callback(saf.OneTime(2)), callback(saf.OneTime(5))).train()
    for changes in ({"n_gpu": 2}, {"deepspeed": "settings.json"}, {"fsdp": ["full_shard"]}):
        with pytest.raises(UnsupportedError):
            callback().on_init_end(
                SimpleNamespace(**{"world_size": 2, "n_gpu": 1, "fp16": False} | changes), None, None
            )
    for refused in (
        lambda: FreezeCallback(CONFIG, None),
        lambda: callback(length=0),
        lambda: callback(batch_size=0),
        lambda: cache_bytes(3),
    ):
        with pytest.raises(InputError):
            refused()


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
    for given, changes in (
        (text, {"tokenizer": None, "length": 8}),
        (text, {}),
        (text, {"length": 40}),
        ([text[0], ids], {"length": 8}),
        ([ids], {"length": 8}),
        (text[0], {"length": 8}),
        ([ids[0], ids[1, :4]], {}),
        ([{"input_ids": ids[0].tolist(), "attention_mask": [1] * 7 + [0]}, ids[1]], {}),
        ([{"input_ids": ids[0].tolist(), "attention_mask": [0] + [1] * 7}], {}),
        ([{"input_ids": ids[0], "position_ids": [*range(3), *range(5)]}], {}),
        ([{"input_ids": ids[0], "cu_seq_lens_q": [0, 3, 8]}], {}),
        ([{"input_ids": ids[0], "seq_lengths": [3, 5]}], {}),
    ):
        with pytest.raises(InputError):
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
