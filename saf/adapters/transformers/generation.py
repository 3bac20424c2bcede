"""What `generate` of transformers asks of models with frozen heads, which refuse first what they cannot follow."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from saf.adapters.transformers.attention import state_of
from saf.adapters.transformers.cache import CRASHES_COMPILED, NOT_QUANTISED, check_offloading
from saf.adapters.transformers.entrance import covered
from saf.errors import InputError, UnsupportedError
from saf.ops.positions import left_padding

LENGTH = "_validate_generated_length"
"""What `generate` calls once it knows how long its output may become, before the first token."""
MASK = "create_masks_for_generate"
"""What `generate` calls for the mask of a pass with a cache of fixed size."""
PADDING = "_prepare_attention_mask_for_generation"
"""What `generate` calls for a mask of the prompts where it is given none."""
CANDIDATES = "_get_candidate_generator"
"""What `generate` calls for what proposes tokens, where another model or the prompt helps."""
GENERATED = (LENGTH, MASK, PADDING, CANDIDATES)


def watch_generation(model: Any) -> None:
    """Let `generate` ask what stands below in the place of the model's class, where that can generate."""
    if hasattr(type(model), LENGTH):
        setattr(model, LENGTH, partial(check_generation, model))
        setattr(model, MASK, mask_for_generation)
        setattr(model, PADDING, partial(mask_of_pad_tokens, model))
        setattr(model, CANDIDATES, partial(candidates_within, model))


def check_generation(model: Any, generation_config: Any, *rest: Any, **options: Any) -> None:
    """Refuse before its first token a generation that frozen heads cannot follow; then check as the class does.

    Raises InputError for one longer than the patterns, whose last token is not read any more, UnsupportedError for a
    quantised cache where a layer has no live head, and for an offloaded one whose copies race, or of fixed size that
    would be compiled.
    """
    kind, on_gpu = generation_config.cache_implementation, model.device.type == "cuda"
    if kind in ("offloaded", "offloaded_static"):
        check_offloading(model.device)
    if kind == "offloaded_static" and on_gpu and not generation_config.disable_compile:
        raise UnsupportedError(CRASHES_COMPILED)
    layouts = [state.layout for module in model.modules() if (state := state_of(module)) is not None]
    if kind == "quantized" and not all(layout.num_live for layout in layouts):
        raise UnsupportedError(NOT_QUANTISED)
    longest, most = covered(model), generation_config.max_length or 0
    if longest is not None and most - 1 > longest:
        if getattr(generation_config, "is_assistant", False):  # of which a few tokens are asked for at a time
            raise InputError(
                f"the assistant_model may reach {most} tokens of its own tokenizer, its frozen heads' patterns "
                f"cover {longest}: lower max_new_tokens, or num_assistant_tokens of its generation_config, by which it "
                f"is asked for {generation_config.max_new_tokens} tokens at a time, or take one that was calibrated at "
                "the longer length"
            )
        raise InputError(
            f"generation may reach {most} tokens, the frozen heads' patterns cover {longest}: lower max_new_tokens so "
            f"that prompt and new tokens are {longest + 1} at most, or calibrate and freeze at the longer length"
        )
    type(model)._validate_generated_length(model, generation_config, *rest, **options)


def mask_for_generation(*, attention_mask: Tensor | None, past_key_values: Any, **_: Any) -> Tensor | None:
    """Return the mask that `generate` hands to a pass with a cache of fixed size, in the place of one of all pairs.

    It keeps the form `[B, T]`, so that attention finds the padding; padded to the cache's places once that is in use,
    it has one shape in every step, which compiled code asks for.
    """
    used = isinstance(past_key_values.get_seq_length(), Tensor)
    if attention_mask is None or not used:
        return attention_mask
    places = past_key_values.get_mask_sizes(attention_mask.shape[1], 0)[0]
    return torch.nn.functional.pad(attention_mask, (0, places - attention_mask.shape[1]))


def mask_of_pad_tokens(model: Any, inputs: Tensor, generation_config: Any, *rest: Any, **options: Any) -> Tensor:
    """Return the mask that `generate` makes of which tokens are padding, where it is given none.

    An assistant is given none by transformers 5.23 where its main model's is all ones. What it proposes is checked by
    that model, so it may take tokens behind the first real one for real. Raises InputError before anything is computed
    where frozen heads of any other model cannot go on after the mask. It waits for the device.
    """
    made = type(model)._prepare_attention_mask_for_generation
    mask = made(model, inputs, generation_config, *rest, **options)
    if getattr(generation_config, "is_assistant", False):
        return mask.cummax(-1).values
    try:
        left_padding(mask)
        left_padding(torch.nn.functional.pad(mask, (0, 1), value=1))  # with the token that comes next
    except InputError as error:
        raise InputError(
            "generate was given no attention_mask and made one of which tokens are pad_token_id. Such tokens stand "
            "behind or between others here, and frozen heads know padding on the left alone: pad there, or, where they "
            "are real tokens, pass an attention_mask of ones, or pad_token_id=eos_token_id, by which it makes none"
        ) from error
    return mask


def check_assistant(
    *, generation_config: Any, assistant_model: Any = None, assistant_tokenizer: Any = None, **_: Any
) -> None:
    """Raise InputError for an assistant whose frozen heads' patterns end before the last token that it proposes.

    One with another tokenizer counts other tokens and raises when it gets there.
    """
    longest = None if assistant_model is None or assistant_tokenizer is not None else covered(assistant_model)
    if longest is not None and generation_config.max_length - 2 > longest:
        raise InputError(
            f"generation may reach {generation_config.max_length} tokens, the patterns of the assistant_model's frozen "
            f"heads cover {longest}: lower max_new_tokens so that prompt and new tokens are {longest + 2} at most, or "
            "take an assistant that was calibrated at the longer length"
        )


def candidates_within(model: Any, *, generation_config: Any, **options: Any) -> Any:
    """Return what proposes tokens to `generate`, held to its `max_length`: the next token after them has to fit, too.

    That which looks them up in the prompt proposes more near the end, which could be more than the patterns cover.
    Raises InputError, before the first token, as `check_assistant`.
    """
    check_assistant(generation_config=generation_config, **options)
    proposer = type(model)._get_candidate_generator(model, generation_config=generation_config, **options)
    propose, most, config = proposer.get_candidates, generation_config.max_length - 1, model.base_model.config

    def get_candidates(input_ids: Tensor, *rest: Any, **more: Any) -> tuple[Tensor, Tensor | None]:
        """Return the tokens `[1, T]` so far with those that are proposed, and the logits of these, if known."""
        layers = getattr(config, "num_hidden_layers", None)
        try:
            tokens, logits = propose(input_ids, *rest, **more)
        finally:
            if layers is not None:  # of which an early exit has fewer, and leaves so many where it raises
                config.num_hidden_layers = layers
        tokens = tokens[:, : max(most, input_ids.shape[1])]
        return tokens, None if logits is None else logits[:, : tokens.shape[1] - input_ids.shape[1]]

    proposer.get_candidates = get_candidates
    return proposer
