"""transformers' `pipeline` on folders of models with frozen heads."""

import pytest
import tokenizers
import torch
from tokenizers import models, pre_tokenizers

from saf.models.adapter import adapter_for
from tests.transformers_models import HEADS, VOCAB, freeze, make

transformers = pytest.importorskip("transformers")

import saf.integrations.transformers  # noqa: E402, F401

WORDS = ["<pad>", "<s>", "</s>", *(f"w{number}" for number in range(3, VOCAB))]
PROMPTS = ["w5 w9 w30", "w7 w8 w41 w12 w6 w50"]


@pytest.fixture
def tokenizer():
    """One whose tokens are words, which pads prompts on the left."""
    backend = tokenizers.Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": WORDS[0], "bos_token": WORDS[1], "eos_token": WORDS[2]}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, padding_side="left", **special)


@pytest.fixture
def folder(tmp_path):
    model = make("gpt2")
    freeze(model)
    model.save_pretrained(tmp_path)
    return tmp_path


def pipeline(task, folder, tokenizer, **options):
    """Return the pipeline of a folder; Qwen2 would read the tokenizer's file as one of its own."""
    return transformers.pipeline(task, model=str(folder), tokenizer=tokenizer, device="cpu", **options)


def test_text_is_generated_alone_and_in_batches_with_padding(folder, tokenizer):
    pipe = pipeline("text-generation", folder, tokenizer)
    assert adapter_for(pipe.model).heads("frozen") == HEADS
    given = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "return_full_text": False}
    expected = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        for _ in range(6):  # without a cache
            with torch.no_grad():
                ids = torch.cat([ids, pipe.model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        expected.append(tokenizer.decode(ids[0, -6:], skip_special_tokens=True))
    assert [pipe(prompt, **given)[0]["generated_text"].strip() for prompt in PROMPTS] == expected
    both = pipe(PROMPTS, batch_size=2, **given)
    assert [one["generated_text"].strip() for (one,) in both] == expected
