"""Likelihoods of choices are of the choices' own tokens: none that a tokenizer adds at the end."""

import json

import pytest
import tokenizers
import torch

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'saf[eval]'")

from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from saf.cli import main
from tests.tasks.zero_shot_files import COUNT, expected, write_tasks
from tests.transformers_models import make

BYTES = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
ADDED = ["<s>", "</s>"]


def backend(merges: list[tuple[str, str]], template: str) -> tokenizers.Tokenizer:
    """A tokenizer of bytes and some merges, which adds tokens to a text by a template."""
    names = [*ADDED, *BYTES, *("".join(pair) for pair in merges)]
    package = tokenizers.Tokenizer(tokenizers.models.BPE({name: at for at, name in enumerate(names)}, merges))
    package.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    package.decoder = tokenizers.decoders.ByteLevel()
    package.add_special_tokens(ADDED)
    own = [(name, names.index(name)) for name in ADDED if name in template]
    package.post_processor = tokenizers.processors.TemplateProcessing(single=template, special_tokens=own)
    return package


def log_prob(model, context: list[int], choice: list[int]) -> float:
    """Nats of a choice behind a context, in float64 and one sequence alone."""
    ids = torch.tensor([[*context, *choice]])
    with torch.no_grad():
        logits = model(ids[:, :-1]).logits[0, len(context) - 1 :]
    return float(logits.log_softmax(-1).gather(1, torch.tensor(choice)[:, None]).sum())


@pytest.fixture
def answers(tmp_path):
    """Return a function that answers SST-2's questions with a tokenizer: what was written, and the model in float64."""

    def answer(package: tokenizers.Tokenizer):
        folder = tmp_path / "model"
        size = package.get_vocab_size()
        make("llama-grouped", vocab_size=size, max_position_embeddings=128).save_pretrained(folder)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=package, bos_token="<s>", eos_token="</s>")
        tokenizer.save_pretrained(folder)
        files = write_tasks(tmp_path / "tasks")
        words = ["evaluate", folder, "--tasks", "sst2", "--task-data", files, "--device", "cpu", "--precision", "fp32"]
        assert main([*map(str, words), "--out", str(tmp_path / "out")]) == 0
        told = [json.loads(line) for line in (tmp_path / "out" / "zero_shot.jsonl").read_text().splitlines()]
        return told, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()

    return answer


@pytest.mark.parametrize("template", ["<s> $A </s>", "$A"])
def test_tokens_that_are_added_at_the_end_are_no_part_of_a_choice(answers, template):
    # Each choice is one token behind the context.
    merged, pairs = ["Ġ"] * 2, []
    for at, word in enumerate(("negative", "positive")):
        for letter in word:
            pairs.append((merged[at], letter))
            merged[at] += letter
    package = backend(pairs, template)
    told, model = answers(package)
    before = [ADDED.index("<s>")] * template.count("<s>")
    for n, answer in enumerate(told[:COUNT]):
        context, choices, _ = expected("sst2", n)
        ids = [*before, *package.encode(context, add_special_tokens=False).ids]
        spelled = [package.encode(f" {choice}", add_special_tokens=False).ids for choice in choices]
        assert [len(tokens) for tokens in spelled] == [1, 1]
        right = [log_prob(model, ids, tokens) for tokens in spelled]
        assert answer["log_probs"] == pytest.approx(right, abs=1e-4)
        assert abs(right[0] - right[1]) > 1e-3
