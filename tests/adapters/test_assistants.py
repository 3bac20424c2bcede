"""Assisted generation: what another model or the prompt proposes changes none of the tokens."""

import pytest
import torch
import transformers

import saf
import saf.integrations.transformers  # ordinary models check their assistants from then on
from saf.bench.models import synthetic_patterns
from saf.errors import InputError
from saf.heads import HeadSet
from tests.adapters.generated import NEW, SETTINGS, generate
from tests.transformers_models import LENGTH, SIZES, freeze, make, tokens

SOME = HeadSet([(0, 0), (0, 1), (2, 2)])


def assistant(family, **changes):
    freeze(model := make(family, **changes), SOME)
    return model


@pytest.mark.parametrize("helper", ["model", "frozen model", "prompt"])
def test_assisted_tokens_are_the_greedy_ones(frozen, helper):
    family, model = frozen
    ids = tokens(1, 9, seed=6)
    ids[0, 5:8] = ids[0, :3]
    expected = generate(model, ids, torch.ones_like(ids), use_cache=False, do_sample=False)
    if helper == "prompt":
        options = {"prompt_lookup_num_tokens": 3}
    else:  # the model before it was frozen: some of its guesses are right
        options = {"assistant_model": make(family) if helper == "model" else assistant(family)}
    assert torch.equal(generate(model, ids, torch.ones_like(ids), do_sample=False, **options), expected)


@pytest.mark.parametrize("main", ["frozen", "ordinary"])
def test_an_assistant_whose_patterns_end_too_early_is_refused_before_the_first_token(main, frozen):
    family, model = frozen
    model = model if main == "frozen" else make(family)
    ids, helper, passes = tokens(1, 9, seed=6), make(family), []
    drawn = torch.Generator().manual_seed(4)
    saf.install_(helper, HeadSet([(1, 0)]), synthetic_patterns(1, ids.shape[1] + NEW - 2, drawn))
    options = {"do_sample": False, "assistant_model": helper, "pad_token_id": 1}
    expected = generate(model, ids, torch.ones_like(ids), use_cache=False, do_sample=False)
    assert torch.equal(generate(model, ids, torch.ones_like(ids), **options), expected)
    watched = [each.base_model.register_forward_pre_hook(lambda *_: passes.append(1)) for each in (model, helper)]
    longer = torch.cat([ids[:, :1], ids], 1)
    with pytest.raises(InputError, match=r"assistant_model .*at most 16"):
        generate(model, longer, torch.ones_like(longer), **options)
    assert not passes
    for each in watched:
        each.remove()


def tokenizer(size):
    """A tokenizer of small letters and of as many pairs of them as the vocabulary has room for."""
    tokenizers = pytest.importorskip("tokenizers")
    letters = [chr(97 + number) for number in range(26)]
    pairs = [(one, other) for one in letters for other in letters][: size - 29]
    words = ["<pad>", "<s>", "</s>", *letters, *map("".join, pairs)]
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE({word: index for index, word in enumerate(words)}, pairs))
    bpe.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="</s>")


def test_an_assistant_with_another_tokenizer_helps_up_to_its_patterns(frozen):
    family, model = frozen
    helper = assistant(family, vocab_size=SIZES["vocab_size"] + 9)
    own, other = tokenizer(SIZES["vocab_size"]), tokenizer(SIZES["vocab_size"] + 9)
    ids = own("abcdxyzbdwabc", return_tensors="pt").input_ids
    helped = {"assistant_model": helper, "tokenizer": own, "assistant_tokenizer": other}
    options = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None, "suppress_tokens": [0, 1, 2]}
    options["attention_mask"] = torch.ones_like(ids)
    expected = model.generate(ids, **options)
    helper.generation_config.num_assistant_tokens = 3
    assert torch.equal(model.generate(ids, **helped, **options), expected)
    helper.generation_config.num_assistant_tokens = 40
    with pytest.raises(InputError, match=f"at most {LENGTH + 1}.*num_assistant_tokens"):
        model.generate(ids, **helped, **options)


def test_prompt_lookup_proposes_nothing_beyond_the_patterns():
    """The prompt repeats itself, so that each pass guesses four tokens, also where fewer are left."""
    model, ids = assistant("llama"), tokens(1, 3, seed=6).repeat(1, 10)
    mask, options = torch.ones_like(ids), SETTINGS | {"max_new_tokens": 3, "do_sample": False}
    expected = model.generate(ids, attention_mask=mask, use_cache=False, **options)
    assert torch.equal(model.generate(ids, attention_mask=mask, prompt_lookup_num_tokens=4, **options), expected)


def test_pad_tokens_within_or_behind_a_prompt_need_a_mask(frozen):
    family, model = frozen
    ids = tokens(1, 9, seed=6)
    ids[0, 3] = model.generation_config.pad_token_id
    behind = torch.cat([tokens(1, 9, seed=6), torch.zeros(1, 2, dtype=torch.long)], 1)
    for some in (ids, behind, behind[:, -1:]):
        with pytest.raises(InputError, match="on the left"):
            generate(model, some, None, do_sample=False)
    given = torch.ones_like(ids)
    greedy = generate(model, ids, given, do_sample=False)
    # Where the model's mask is of ones, transformers 5.23 infers its assistant's from pad tokens, generated ones too.
    for padding in (model.generation_config.pad_token_id, int(greedy[0, -NEW + 1])):
        options = {"do_sample": False, "assistant_model": assistant(family), "pad_token_id": padding}
        assert torch.equal(generate(model, ids, given, **options), greedy)


def test_an_early_exit_that_raises_leaves_the_model_its_layers(frozen):
    _, model = frozen
    ids = tokens(1, 9, seed=6)

    class Stops(transformers.LogitsProcessor):
        def __call__(self, *_):
            raise ValueError("stopped")

    options = {"do_sample": False, "assistant_early_exit": 1, "logits_processor": [Stops()]}
    with pytest.raises((ValueError, TypeError)):  # the latter from transformers 5.17, whose early exits fail
        generate(model, ids, torch.ones_like(ids), **options)
    assert model.config.num_hidden_layers == len(model.base_model.layers)
