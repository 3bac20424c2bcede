"""What proposes tokens to models with frozen heads, other models or the prompt, changes none of those that come."""

import pytest
import torch
import transformers

import saf
import saf.integrations.transformers  # ordinary models look at their assistants from then on
from saf.bench.models import synthetic_patterns
from saf.errors import InputError
from saf.heads import HeadSet
from tests.adapters.generated import NEW, SETTINGS, generate
from tests.transformers_models import LENGTH, SIZES, freeze, make, tokens


@pytest.mark.parametrize("helper", ["model", "frozen model", "prompt"])
def test_assisted_tokens_are_the_greedy_ones(frozen, helper):
    family, model = frozen
    ids = tokens(1, 9, seed=6)
    ids[0, 5:8] = ids[0, :3]
    again = generate(model, ids, torch.ones_like(ids), use_cache=False, do_sample=False)
    if helper == "prompt":
        options = {"prompt_lookup_num_tokens": 3}
    else:
        # The model itself before it was frozen: of its guesses some are taken.
        assistant = make(family)
        if helper == "frozen model":
            freeze(assistant, HeadSet([(0, 0), (0, 1), (2, 2)]))
        options = {"assistant_model": assistant}
    assert torch.equal(generate(model, ids, torch.ones_like(ids), do_sample=False, **options), again)


@pytest.mark.parametrize("main", ["frozen", "ordinary"])
def test_an_assistant_whose_patterns_end_too_early_is_refused_before_the_first_token(main, frozen):
    family, model = frozen
    model = model if main == "frozen" else make(family)
    ids, assistant, passes = tokens(1, 9, seed=6), make(family), []
    drawn = torch.Generator().manual_seed(4)
    saf.install_(assistant, HeadSet([(1, 0)]), synthetic_patterns(1, ids.shape[1] + NEW - 2, drawn))
    options = {"do_sample": False, "assistant_model": assistant, "pad_token_id": 1}
    again = generate(model, ids, torch.ones_like(ids), use_cache=False, do_sample=False)
    assert torch.equal(generate(model, ids, torch.ones_like(ids), **options), again)
    watched = [each.base_model.register_forward_pre_hook(lambda *_: passes.append(1)) for each in (model, assistant)]
    longer = torch.cat([ids[:, :1], ids], 1)
    with pytest.raises(InputError, match=r"reach 17 tokens, .* assistant_model's frozen heads cover 14: .* 16 at most"):
        generate(model, longer, torch.ones_like(longer), **options)
    assert not passes
    for each in watched:
        each.remove()


def tokenizer(size):
    """Text of small letters by a vocabulary of them and of as many pairs as it has room for."""
    tokenizers = pytest.importorskip("tokenizers")
    letters = [chr(97 + number) for number in range(26)]
    pairs = [(one, other) for one in letters for other in letters][: size - 29]
    words = ["<pad>", "<s>", "</s>", *letters, *map("".join, pairs)]
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE({word: place for place, word in enumerate(words)}, pairs))
    bpe.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="</s>")


@pytest.mark.parametrize("main", ["frozen", "ordinary"])
def test_an_assistant_with_another_tokenizer_helps_up_to_its_patterns_in_its_own_tokens(main, frozen):
    family, model = frozen
    model, assistant = model if main == "frozen" else make(family), make(family, vocab_size=SIZES["vocab_size"] + 9)
    freeze(assistant, HeadSet([(0, 0), (0, 1), (2, 2)]))
    own, other = tokenizer(SIZES["vocab_size"]), tokenizer(SIZES["vocab_size"] + 9)
    ids = own("abcdxyzbdwabc", return_tensors="pt").input_ids
    helped = {"assistant_model": assistant, "tokenizer": own, "assistant_tokenizer": other}
    options = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None, "suppress_tokens": [0, 1, 2]}
    options["attention_mask"] = torch.ones_like(ids)
    again = model.generate(ids, **options)
    assistant.generation_config.num_assistant_tokens = 3
    assert torch.equal(model.generate(ids, **helped, **options), again)
    assistant.generation_config.num_assistant_tokens = 40
    refused = (
        rf"own tokenizer, its .* cover {LENGTH}: lower max_new_tokens, or num_assistant_tokens .* 40 tokens at a time"
    )
    with pytest.raises(InputError, match=refused):
        model.generate(ids, **helped, **options)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_tokens_looked_up_in_the_prompt_are_none_beyond_what_the_patterns_cover(family):
    """The prompt repeats itself, so that each pass guesses four tokens more, also where fewer are left."""
    model, ids = make(family), tokens(1, 3, seed=6).repeat(1, 10)
    freeze(model, HeadSet([(0, 0), (0, 1), (2, 2)]))
    mask, options = torch.ones_like(ids), SETTINGS | {"max_new_tokens": 3, "do_sample": False}
    again = model.generate(ids, attention_mask=mask, use_cache=False, **options)
    assert torch.equal(model.generate(ids, attention_mask=mask, prompt_lookup_num_tokens=4, **options), again)


def test_pad_tokens_within_a_prompt_or_behind_it_are_refused_where_they_make_a_mask(frozen):
    family, model = frozen
    ids = tokens(1, 9, seed=6)
    ids[0, 3] = model.generation_config.pad_token_id
    assistant = make(family)
    freeze(assistant, HeadSet([(0, 0), (0, 1), (2, 2)]))
    given, options = torch.ones_like(ids), {"do_sample": False, "assistant_model": assistant}
    greedy = generate(model, ids, given, do_sample=False)
    refused = (
        r"made one of which tokens are pad_token_id\. .* pass an attention_mask of ones, or pad_token_id=eos_token_id"
    )
    behind = torch.cat([tokens(1, 9, seed=6), torch.zeros(1, 2, dtype=torch.long)], 1)
    passes = []
    watched = model.base_model.register_forward_pre_hook(lambda *_: passes.append(1))
    for some in (ids, behind, behind[:, -1:]):
        with pytest.raises(InputError, match=refused):
            generate(model, some, None, do_sample=False)
    watched.remove()
    assert not passes
    with pytest.raises(InputError, match=r"between real ones; to go on after a prompt, pad on the left$"):
        model(ids, attention_mask=(ids > 0).long())
    # Where the model's mask is of ones, transformers 5.23 makes its assistant's of which tokens are padding.
    for options["pad_token_id"] in (model.generation_config.pad_token_id, model.generation_config.eos_token_id):
        assert torch.equal(generate(model, ids, given, **options), greedy)


def test_pad_tokens_that_a_model_generates_do_not_stop_its_assistant(frozen):
    """Some token that the frozen model says is the one of padding."""
    family, model = frozen
    ids, assistant = tokens(1, 9, seed=6), make(family)
    freeze(assistant, HeadSet([(0, 0), (0, 1), (2, 2)]))
    greedy = generate(model, ids, torch.ones_like(ids), do_sample=False)
    said = int(greedy[0, -NEW + 1])
    options = {"do_sample": False, "pad_token_id": said, "assistant_model": assistant}
    assert torch.equal(generate(model, ids, torch.ones_like(ids), **options), greedy)


def test_an_early_exit_that_raises_leaves_the_model_its_layers(frozen):
    _, model = frozen
    ids = tokens(1, 9, seed=6)
    with torch.no_grad():
        before = model(ids).logits

    class Stops(transformers.LogitsProcessor):
        def __call__(self, *_):
            raise ValueError("stopped")

    options = {"do_sample": False, "assistant_early_exit": 1, "logits_processor": [Stops()]}
    with pytest.raises((ValueError, TypeError)):  # the latter from transformers 5.17, whose early exits fail
        generate(model, ids, torch.ones_like(ids), **options)
    assert model.config.num_hidden_layers == len(model.base_model.layers)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before)
