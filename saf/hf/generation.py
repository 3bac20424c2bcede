"""`generate` and single passes with frozen heads: lengths beyond the patterns are refused before the first layer.

transformers looks several methods up on the model; `watch_generation` puts the functions below in their place.
"""

import inspect
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from saf.errors import InputError, UnsupportedError
from saf.hf.attention import state_of
from saf.hf.cache import NOT_COMPILED, NOT_QUANTISED, check_offloading
from saf.hf.masks import longest_document
from saf.ops.frozen_heads import FrozenHeads, beyond_patterns
from saf.ops.positions import left_padding

_CANDIDATES = "_get_candidate_generator"


def covered(model: nn.Module) -> int | None:
    """Return how many positions the patterns of all frozen heads cover; None where no head is frozen."""
    return min((heads.max_length for heads in model.modules() if isinstance(heads, FrozenHeads)), default=None)


def watch_length(decoder: Any) -> None:
    """Let a decoder refuse inputs longer than its patterns before a layer computes, so that a cache stays as it was."""
    for number, hook in list(decoder._forward_pre_hooks.items()):
        if isinstance(hook, partial) and hook.func is _check_length:
            del decoder._forward_pre_hooks[number]
            decoder._forward_pre_hooks_with_kwargs.pop(number, None)
    if (longest := covered(decoder)) is not None:
        names = tuple(inspect.signature(type(decoder).forward).parameters)[1:]
        decoder.register_forward_pre_hook(partial(_check_length, longest, names), with_kwargs=True)


def _check_length(
    longest: int, names: tuple[str, ...], _: Any, positional: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """Raise InputError for a pass, or a cache of fixed size, of more than `longest` positions, padding included."""
    inputs = dict(zip(names, positional, strict=False)) | options
    past, rows = inputs.get("past_key_values"), inputs.get("input_ids")
    rows = inputs.get("inputs_embeds") if rows is None else rows
    layers = getattr(past, "layers", None) or [None]
    if (places := getattr(layers[0], "max_cache_len", 0)) > longest:
        raise InputError(f"max_cache_len must be at most {longest}, which the patterns cover, got {places}")
    length = 0 if past is None else past.get_seq_length()
    # A tensor is the length of a cache of fixed size, whose places were counted.
    if rows is None or isinstance(length, Tensor) or (total := rows.shape[1] + length) <= longest:
        return
    positions = inputs.get("position_ids")
    if positions is not None and past is None and inputs.get("attention_mask") is None:
        total = total if torch.compiler.is_compiling() else longest_document(positions)  # perhaps packed
    if total > longest:
        raise InputError(beyond_patterns(total, longest))


def watch_generation(model: Any) -> None:
    """Put the functions below in the place of a model's methods, where its class can generate."""
    if hasattr(type(model), "_validate_generated_length"):
        model._validate_generated_length = partial(_check_generation, model)
        model.create_masks_for_generate = _mask_for_generation
        model._prepare_attention_mask_for_generation = partial(_mask_of_pad_tokens, model)
        model._get_candidate_generator = partial(_candidates, model)


def unwatch_generation(model: Any) -> None:
    """Give a model the methods of its class back."""
    own = ("_validate_generated_length", "create_masks_for_generate", "_prepare_attention_mask_for_generation")
    for name in (*own, _CANDIDATES):
        vars(model).pop(name, None)


def _check_generation(model: Any, generation_config: Any, *rest: Any, **options: Any) -> None:
    """Refuse lengths and caches that frozen heads cannot follow, before the first token of the output."""
    kind = generation_config.cache_implementation
    if kind in ("offloaded", "offloaded_static"):
        check_offloading(model.device)
    if kind == "offloaded_static" and model.device.type == "cuda" and not generation_config.disable_compile:
        raise UnsupportedError(NOT_COMPILED)
    layouts = [state.layout for module in model.modules() if (state := state_of(module)) is not None]
    if kind == "quantized" and not all(layout.num_live for layout in layouts):
        raise UnsupportedError(NOT_QUANTISED)
    # The last token is not read any more.
    if (longest := covered(model)) is not None and (most := generation_config.max_length or 0) - 1 > longest:
        raise InputError(
            f"prompt and new tokens must be at most {longest + 1}, one more than patterns cover, got {most}: lower "
            "max_new_tokens (of an assistant num_assistant_tokens)"
        )
    type(model)._validate_generated_length(model, generation_config, *rest, **options)


def _mask_for_generation(*, attention_mask: Tensor | None, past_key_values: Any, **_: Any) -> Tensor | None:
    """Return the mask `[B, T]` of a pass with a cache of fixed size, where transformers makes one of all pairs.

    It is padded to the cache's places once that is in use: one shape in every step, which compiled code needs.
    """
    used = isinstance(past_key_values.get_seq_length(), Tensor)
    if attention_mask is None or not used:
        return attention_mask
    places = past_key_values.get_mask_sizes(attention_mask.shape[1], 0)[0]
    return torch.nn.functional.pad(attention_mask, (0, places - attention_mask.shape[1]))


def _mask_of_pad_tokens(model: Any, inputs: Tensor, generation_config: Any, *rest: Any, **options: Any) -> Tensor:
    """Return the mask that `generate` infers from pad tokens; raise InputError where these are not on the left alone.

    An assistant gets no mask from transformers 5.23 where the model's is all ones; its proposals are verified, so it
    may read pad tokens behind the first real one.
    """
    own = type(model)._prepare_attention_mask_for_generation
    mask = own(model, inputs, generation_config, *rest, **options)
    if getattr(generation_config, "is_assistant", False):
        return mask.cummax(-1).values
    try:
        left_padding(mask)
        left_padding(torch.nn.functional.pad(mask, (0, 1), value=1))  # with the token that comes next
    except InputError as error:
        raise InputError(
            "pad tokens must be on the left of each prompt: pad there, or give an attention_mask, or "
            "pad_token_id=eos_token_id where they are real"
        ) from error
    return mask


def check_assistant(
    *, generation_config: Any, assistant_model: Any = None, assistant_tokenizer: Any = None, **_: Any
) -> None:
    """Raise InputError for an assistant whose patterns end before the last token that it proposes.

    One with another tokenizer counts other tokens and raises when it gets there.
    """
    longest = None if assistant_model is None or assistant_tokenizer is not None else covered(assistant_model)
    if longest is not None and generation_config.max_length - 2 > longest:
        raise InputError(
            f"with this assistant_model prompt and new tokens must be at most {longest + 2}, two more than its "
            f"patterns cover, got {generation_config.max_length}: lower max_new_tokens"
        )


@cache
def watch_assistants() -> None:
    """Let `generate` of every model check assistants with frozen heads first, from now on.

    Only the method that builds the candidate generator knows how long the output may become.
    """
    from transformers import GenerationMixin

    ordinary = vars(GenerationMixin)[_CANDIDATES]

    @wraps(ordinary)
    def candidate_generator(self: Any, *arguments: Any, **options: Any) -> Any:
        if not arguments:
            check_assistant(**options)
        return ordinary(self, *arguments, **options)

    setattr(GenerationMixin, _CANDIDATES, candidate_generator)


def _candidates(model: Any, *, generation_config: Any, **options: Any) -> Any:
    """Return the candidate generator of `generate`, limited to `max_length`.

    Prompt lookup proposes more near the end, which could be more than the patterns cover. A recurrent state cannot
    take back more than a chunk.
    """
    check_assistant(generation_config=generation_config, **options)
    proposer = type(model)._get_candidate_generator(model, generation_config=generation_config, **options)
    states = [heads.state_sizes() for heads in model.modules() if isinstance(heads, FrozenHeads) and heads.linear]
    chunk = min((rows for _, _, rows, _ in states), default=generation_config.max_length)
    propose, most, config = proposer.get_candidates, generation_config.max_length - 1, model.base_model.config

    def get_candidates(input_ids: Tensor, *rest: Any, **more: Any) -> tuple[Tensor, Tensor | None]:
        layers = config.num_hidden_layers
        try:
            tokens, logits = propose(input_ids, *rest, **more)
        finally:
            config.num_hidden_layers = layers  # early exit leaves fewer where it raises
        tokens = tokens[:, : min(max(most, input_ids.shape[1]), input_ids.shape[1] + chunk)]
        return tokens, None if logits is None else logits[:, : tokens.shape[1] - input_ids.shape[1]]

    proposer.get_candidates = get_candidates
    return proposer
