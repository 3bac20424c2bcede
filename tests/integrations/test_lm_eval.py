"""lm-eval's tasks on models in memory: its prompts, this project's likelihoods, and what cannot be answered."""

from typing import Any

import pytest
import tokenizers
import torch

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'saf[eval]'")

from lm_eval.models.huggingface import HFLM
from transformers import PreTrainedTokenizerFast

import saf
from saf.bench.models import synthetic_patterns
from saf.data.tokenizer import train_bpe
from saf.errors import DataError, InputError, UnsupportedError
from saf.hf.lm_eval import ExactLengthModel, answer_tasks
from saf.models import GPT, GPTConfig
from saf.models.adapter import language_model
from saf.opening import Encoder, open_model
from saf.tasks.zero_shot import ZERO_SHOT
from tests.tasks.zero_shot_files import COUNT, expected, write_tasks
from tests.transformers_models import make

LENGTH = 128


def encode(text: str) -> list[int]:
    """Bytes are tokens, so that a prompt is what it spells."""
    return list(text.encode())


BYTES = Encoder(encode, encode, 0)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("tasks"))


def gpt(length: int = LENGTH) -> GPT:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GPT(GPTConfig(vocab_size=256, num_layers=2, num_heads=4, hidden_size=32, max_length=length))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.parametrize("family", ["gpt", "gemma2"])
def test_tasks_are_answered_with_lm_evals_prompts_and_exact_likelihoods(family, files):
    model = gpt() if family == "gpt" else make(family, vocab_size=256, max_position_embeddings=LENGTH)
    patterns = synthetic_patterns(2, LENGTH, torch.Generator().manual_seed(0))
    saf.install_(model, saf.HeadSet([(0, 1), (1, 2)]), patterns)
    tasks: list[Any] = list(ZERO_SHOT) if family == "gpt" else ["arc_easy"]
    found = answer_tasks(ExactLengthModel(model, BYTES, batch_size=5), tasks, folder=files)
    language = language_model(model.double())
    assert list(found) == tasks
    for name, task in found.items():
        assert len(task.answers) == COUNT
        for n, answer in enumerate(task.answers):
            context, choices, right = expected(name, n)
            sums = []
            for choice in choices:
                ids = torch.tensor([encode(f"{context} {choice}")])
                with torch.no_grad():
                    rows = language.last_logits(model, ids[:, :-1], len(choice.encode()) + 1).log_softmax(-1)[0]
                sums.append(float(rows.gather(1, ids[0, -len(rows) :, None]).sum()))
            assert answer["log_probs"] == pytest.approx(sums, rel=1e-3, abs=1e-3), (name, n)
            taken = max(range(len(sums)), key=sums.__getitem__)
            assert (answer["answer"], answer["taken"], answer["right"]) == (right, taken, taken == right)
            assert ("right_norm" in answer) is (name not in ("sst2", "boolq"))
    if family == "gpt":
        assert found["sst2"].record["labels"] == ["negative", "positive"]
        assert found["boolq"].record["source"]["path"].endswith("boolq/val.jsonl")


def test_lm_evals_own_model_class_says_the_same(files, tmp_path):
    """With a tokenizer that begins a text with a token of its own; that class pads, which an ordinary model ignores."""
    model = make("llama-grouped", vocab_size=300, max_position_embeddings=LENGTH)
    text = [path.read_text() for path in sorted(files.rglob("*.*")) if path.suffix in (".jsonl", ".tsv")]
    train_bpe(text, vocab_size=299).save(tmp_path / "tokenizer.json")
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_special_tokens(["<s>"])
    first = backend.token_to_id("<s>")
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", first)])
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="<|endoftext|>").save_pretrained(
        tmp_path
    )
    model.save_pretrained(tmp_path)
    opened = open_model(tmp_path, None, "cpu", needs_data=False)
    ours, seen = ExactLengthModel(opened.model, opened.encoder(), batch_size=4), []
    handle = opened.model.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    found = answer_tasks(ours, list(ZERO_SHOT), folder=files)
    handle.remove()
    assert all((ids[:, 0] == first).all() and not (ids[:, 1:] == first).any() for ids in seen)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    other = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4)
    other.cut = set()
    theirs = answer_tasks(other, list(ZERO_SHOT), folder=files)
    for name, task in found.items():
        for one, two in zip(task.answers, theirs[name].answers, strict=True):
            assert one["log_probs"] == pytest.approx(two["log_probs"], abs=1e-4), name
            assert {**one, "log_probs": 0} == {**two, "log_probs": 0}


def test_long_questions_are_refused_or_cut_at_their_beginning(files):
    model = gpt(length=40)
    with pytest.raises(InputError, match=r"at most 40 tokens, got \d+; --too-long cut"):
        answer_tasks(ExactLengthModel(model, BYTES), ["sst2"], folder=files)
    lm = ExactLengthModel(model, BYTES, too_long="cut")
    (answer,) = answer_tasks(lm, ["sst2"], folder=files, questions=1)["sst2"].answers
    assert answer["shortened"]
    context, choices, _ = expected("sst2", 0)
    ids = torch.tensor([encode(f"{context} {choices[1]}")[-41:]])
    with torch.no_grad():
        rows = model(ids[:, :-1]).log_softmax(-1)[0, -9:]
    assert answer["log_probs"][1] == pytest.approx(float(rows.gather(1, ids[0, -9:, None]).sum()), abs=1e-4)


def test_the_hub_that_is_not_there_and_what_is_no_choice(files):
    with pytest.raises(DataError, match=r"the hub must have .*--task-data"):
        answer_tasks(ExactLengthModel(gpt(), BYTES), ["boolq"])
    lm = ExactLengthModel(gpt(), Encoder(encode, encode, None))
    for refused in (lm.generate_until, lm.loglikelihood_rolling):
        with pytest.raises(UnsupportedError):
            refused([])
    with pytest.raises(UnsupportedError, match="no token to begin with"):
        assert lm.eot_token_id
