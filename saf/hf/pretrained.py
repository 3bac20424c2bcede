"""`patch_pretrained` lets transformers save, open and upload models with frozen heads, and generate within their limit.

A saved folder has the weights, `saf.json` and `saf.safetensors`, and a section of the model card (model_card.py).
transformers builds an empty model from the configuration, then loads weights into it. Frozen heads have no query and
key rows, so the empty model's projections are resized before the weights are loaded, and its heads restored afterwards.
"""

import copy
from collections.abc import Callable
from functools import cache, wraps
from inspect import getattr_static
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel
from transformers.utils.hub import cached_file

from saf.errors import CheckpointError, InputError, UnsupportedError
from saf.freeze_report import current_events
from saf.frozen_state import (
    STATE_FILE,
    TENSORS_FILE,
    check_savable,
    description_of,
    read_description,
    resize_,
    restore_,
    write_description,
)
from saf.heads import EDITED
from saf.hf.attention import NAME, config_entry, state_of
from saf.hf.model_card import CARD, entry_of, write_section
from saf.models.adapter import Adapter, adapter_for, language_model
from saf.models.frozen_layout import LAYOUT, compare_layouts
from saf.records.files import new_files

_HUB = ("cache_dir", "force_download", "proxies", "local_files_only", "token", "revision", "subfolder")
"""Arguments of `from_pretrained` that locate files."""
_PEFT = "_hf_peft_config_loaded"
"""The attribute of a model whose `save_pretrained` writes only its peft adapters."""


@cache
def patch_pretrained() -> None:
    """Wrap the methods of transformers that open, save, upload and generate; further calls do nothing."""
    for method in (from_pretrained, save_pretrained, _upload_modified_files):
        wrap_method(PreTrainedModel, method)
    wrap_method(GenerationMixin, _prepare_cache_for_generation)


def wrap_method(owner: Any, function: Callable[..., Any]) -> None:
    """Replace the method of `owner` named like `function`, which gets the original method as its first argument."""
    method = getattr_static(owner, function.__name__)
    original = getattr(method, "__func__", method)  # `__func__` of a classmethod

    @wraps(original)
    def wrapped(self: Any, *arguments: Any, **options: Any) -> Any:
        return function(original, self, *arguments, **options)

    setattr(owner, function.__name__, wrapped if method is original else classmethod(wrapped))


# --- saving


def save_pretrained(
    original: Any, model: Any, save_directory: Any, is_main_process: bool = True, *rest: Any, **options: Any
) -> Any:
    """Save a model as transformers does, with the files about its edited heads."""
    folder, adapter = Path(save_directory), _edited_adapter(model)
    if adapter is not None and is_main_process and not folder.is_file():  # for a file the original method raises
        entry = entry_of(adapter)
        if not config_entry(model.config):  # heads were frozen in a submodel with its own configuration
            model.config.saf = entry
        entry["events"] = current_events(entry["events"], adapter.heads(*EDITED))
        check_savable(adapter)
        state, tensors = description_of(adapter, checksums=True)
        with new_files(folder) as new:
            write_description(new, state, tensors)
        write_section(folder, adapter)
    elif adapter is None and config_entry(model.config) and not getattr(model, _PEFT, False):
        model.config = copy.deepcopy(model.config)  # another model with frozen heads may use it
        del model.config.saf
    return original(model, save_directory, is_main_process, *rest, **options)


def _upload_modified_files(
    original: Any, model: Any, working_dir: Any, repo_id: str, files_timestamps: dict[str, float], **options: Any
) -> Any:
    """Upload the files about heads too, and add their section to the model card that transformers has just written."""
    if (adapter := _edited_adapter(model)) is not None:
        write_section(Path(working_dir), adapter)
        # Files without an old timestamp count as modified.
        times = files_timestamps.items()
        files_timestamps = {name: time for name, time in times if name not in (STATE_FILE, TENSORS_FILE, CARD)}
    return original(model, working_dir, repo_id, files_timestamps, **options)


def _edited_adapter(model: Any) -> Adapter | None:
    """Return the adapter of a model with edited heads; None for others, and where only peft adapters are saved."""
    edited = any((state := state_of(each)) is not None and not state.layout.ordinary for each in model.modules())
    if not edited or getattr(model, _PEFT, False):
        return None
    adapter = language_model(model)
    if not adapter.sites():
        return None
    adapter.check_attention()  # weights within adapters of peft would be saved by names that no folder opens with
    return adapter


# --- opening


def from_pretrained(
    original: Any, cls: Any, pretrained_model_name_or_path: Any, *arguments: Any, config: Any = None, **options: Any
) -> Any:
    """Open a model as transformers does, with its frozen heads if it has some."""
    name = pretrained_model_name_or_path
    hub = {option: options[option] for option in _HUB if options.get(option) is not None}
    gguf = options.get("gguf_file") is not None
    if name is None or gguf or not _has_edited_heads(cls, name if config is None else config, hub):
        return original(cls, name, *arguments, config=config, **options)
    if options.get("quantization_config") is not None:
        raise UnsupportedError(
            "a folder with frozen heads opens unquantised: drop quantization_config, then quantise the model"
        )
    if "_adapter_model_path" in (options.get("adapter_kwargs") or {}):  # a folder of peft, whose base is `name`
        raise UnsupportedError(f"open {name} first, whose heads are frozen, then PeftModel.from_pretrained")
    with_info = options.pop("output_loading_info", False)
    state, tensors = read_description(_folder(name, hub))
    resized = _resized_class(cls, state)
    opened = original(resized, name, *arguments, config=config, output_loading_info=True, **options)
    model, info = opened
    # Layers that the file does not name would keep random weights.
    if any(key.endswith(f".{NAME}.{LAYOUT}") for key in info["missing_keys"]):
        saved_as = next(iter(model.config.architectures or ()), "another class")
        raise UnsupportedError(f"{cls.__name__} names its layers differently: open {name} by {saved_as}")
    model.__class__ = cls
    _restore_heads_(model, state, tensors)
    return opened if with_info else model


def _has_edited_heads(cls: Any, config: Any, hub: dict[str, Any]) -> bool:
    """Return whether a configuration, or the config.json of a folder, records frozen or pruned heads."""
    if not isinstance(config, str | Path):
        return bool(config_entry(config))
    if cls.config_class is None:
        return False
    try:
        values, _ = cls.config_class.get_config_dict(config, **hub)
    except OSError:  # a peft adapter, or no folder at all, for which the original method raises
        return False
    return values.get("saf") is not None


def _folder(name: Any, hub: dict[str, Any]) -> Path:
    """Return the local folder with both files about a model's heads; raise CheckpointError where one is missing."""
    hub = hub | {"_raise_exceptions_for_missing_entries": False}
    files = [cached_file(name, file, **hub) for file in (STATE_FILE, TENSORS_FILE)]
    if None in files:
        raise CheckpointError(
            f"{name} must hold {STATE_FILE} and {TENSORS_FILE}, as its configuration has frozen heads: copy them"
        )
    return Path(str(files[0])).parent


def _resized_class(cls: Any, state: dict[str, Any]) -> Any:
    """Return a subclass of a model's class, for loading alone, whose projections have the shapes of `saf.json`."""

    def init(self: Any, *arguments: Any, **options: Any) -> None:
        cls.__init__(self, *arguments, **options)
        for site, layout in resize_(self, state):
            holder = torch.nn.Module()  # receives the layout in the weights' file, for `_restore_heads_` to compare
            holder.register_buffer(LAYOUT, torch.empty(layout.num_heads, 2, dtype=torch.int64))
            site.attention.register_module(NAME, holder)

    # transformers reads the source of a class's module, and takes classes of other modules for the user's code.
    names = {name: getattr(cls, name) for name in ("__doc__", "__module__", "__qualname__")}
    return type(cls.__name__, (cls,), names | {"__init__": init})


def _restore_heads_(model: Any, state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Restore the heads of a model with loaded weights; raise CheckpointError where the weights have other heads."""
    sites: list[Any] = list(adapter_for(model).sites())
    # accelerate leaves offloaded weights on the meta device, where they cannot be compared or restored.
    if any(weight.is_meta for site in sites for weight, _ in site.projections().values()):
        raise UnsupportedError("attention layers with frozen heads must not be offloaded: give them devices")
    layouts = []
    for site in sites:
        holder = getattr(site.attention, NAME, None)
        layouts.append(None if holder is None else getattr(holder, LAYOUT))
        if holder is not None:
            delattr(site.attention, NAME)
    restore_(model, state, tensors)
    for site, layout in zip(sites, layouts, strict=True):
        own = state_of(site.attention)
        compare_layouts(f"layer {site.attention.layer_idx}", None if own is None else own.frozen_layout, layout)


# --- generating


def _prepare_cache_for_generation(
    original: Any, model: Any, generation_config: Any, model_kwargs: Any, mode: Any, batch_size: int, length: int
) -> Any:
    """Raise InputError where prompt and new tokens are too many for the patterns.

    The last token is never an input, so one token more than the patterns cover is allowed.
    """
    longest = config_entry(model.config).get("max_length")
    if longest is not None and length > longest:
        raise InputError(
            f"prompt and new tokens must be at most {longest + 1} together, as the frozen heads' patterns cover "
            f"{longest}, got {length + 1}: shorten the prompt or lower max_new_tokens"
        )
    return original(model, generation_config, model_kwargs, mode, batch_size, length)
