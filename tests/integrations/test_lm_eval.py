"""lm-eval's tasks on models in memory: its prompts, this project's likelihoods, and what cannot be answered."""

from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'saf[eval]'")

import saf
from saf.errors import DataError, InputError, UnsupportedError
from saf.hf.lm_eval import ExactLengthModel, answer_tasks
from saf.models import GPT, GPTConfig
from saf.models.adapter import language_model
from saf.opening import Encoder
from saf.synthetic import synthetic_patterns
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
            by_length = max(range(len(sums)), key=lambda at, sums=sums, of=choices: sums[at] / len(of[at]))
            assert answer.get("right_norm") == (None if name in ("sst2", "boolq") else by_length == right)
    if family == "gpt":
        assert found["sst2"].record["labels"] == ["negative", "positive"]
        assert found["boolq"].record["source"]["path"].endswith("boolq/val.jsonl")


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
