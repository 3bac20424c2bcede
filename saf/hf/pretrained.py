"""`save_pretrained` and `from_pretrained` of models with frozen heads: weights, `saf.json` and `saf.safetensors`.

`watch_folders` wraps these methods of `PreTrainedModel`. transformers builds a model from its configuration, without
weights, then fills it: a frozen head has no rows of queries and keys, so the empty model is cut to the shapes of the
file in between, and gets its heads once it is filled.
"""

import copy
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.hub import cached_file

from saf.errors import CheckpointError, UnsupportedError
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
from saf.hf.adapter import TransformersAdapter
from saf.hf.attention import NAME, HeadState, state_of
from saf.hf.card import CARD, mark_of, section, unmark_, write_section
from saf.models.adapter import Adapter, adapter_for
from saf.ops.frozen_heads import LAYOUT, compare_layouts
from saf.records.files import new_files

_HUB = ("cache_dir", "force_download", "proxies", "local_files_only", "token", "revision", "subfolder")
"""Arguments of `from_pretrained` that locate files."""


@cache
def watch_folders() -> None:
    """Let models of transformers open and save folders with frozen heads, from now on."""
    methods: Any = vars(PreTrainedModel)
    own: Any = PreTrainedModel
    own.from_pretrained = classmethod(_opening(methods["from_pretrained"].__func__))
    own.save_pretrained = _saving(methods["save_pretrained"])
    own._upload_modified_files = _uploading(own._upload_modified_files)


def _saving(ordinary: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(ordinary)
    def save_pretrained(
        self: Any, save_directory: Any, is_main_process: bool = True, *rest: Any, **options: Any
    ) -> Any:
        """Save a model with its heads."""
        folder, adapter = Path(save_directory), _edited(self)
        if adapter is not None and is_main_process and not folder.is_file():
            if mark_of(self.config) is None:  # the heads of a part of this model were frozen
                self.config.saf = mark_of(adapter.sites()[0].attention.config)
            check_savable(adapter)
            state, tensors = description_of(adapter, checksums=True)
            with new_files(folder) as new:
                write_description(new, state, tensors)
            write_section(folder, section(adapter))
        elif adapter is None and mark_of(self.config) is not None and not _saves_adapters(self):
            self.config = copy.deepcopy(self.config)  # that of a model with heads, from which this one was built
            unmark_(self.config)
        return ordinary(self, save_directory, is_main_process, *rest, **options)

    return save_pretrained


def _uploading(ordinary: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(ordinary)
    def _upload_modified_files(
        self: Any, working_dir: Any, repo_id: str, files_timestamps: dict[str, float], **options: Any
    ) -> Any:
        """Upload the files about heads, too, and their section in the card that transformers has just written."""
        if (adapter := _edited(self)) is not None:
            write_section(Path(working_dir), section(adapter))
            times = files_timestamps.items()
            files_timestamps = {name: time for name, time in times if name not in (STATE_FILE, TENSORS_FILE, CARD)}
        return ordinary(self, working_dir, repo_id, files_timestamps, **options)

    return _upload_modified_files


def _saves_adapters(model: Any) -> bool:
    """Return whether saving a model writes its adapters of peft alone."""
    return getattr(model, "_hf_peft_config_loaded", False)


def _edited(model: Any) -> Adapter | None:
    """Return the adapter of a model with edited heads; None for any other, and where peft's alone are saved."""
    states = (module for module in model.modules() if isinstance(module, HeadState))
    ordinary = _saves_adapters(model) or all(state.layout.ordinary for state in states)
    return None if ordinary else TransformersAdapter.of(model)


def _opening(ordinary: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(ordinary)
    def from_pretrained(cls: Any, name: Any, *model_args: Any, config: Any = None, **options: Any) -> Any:
        """Open a folder with frozen heads with them, and any other one as before."""
        places = {each: options[each] for each in _HUB if options.get(each) is not None}
        gguf = options.get("gguf_file") is not None
        if name is None or gguf or not _is_marked(cls, name if config is None else config, places):
            return ordinary(cls, name, *model_args, config=config, **options)
        if options.get("quantization_config") is not None:
            raise UnsupportedError("a folder with frozen heads opens in its own weights; quantise the open model")
        if "_adapter_model_path" in (options.get("adapter_kwargs") or {}):
            raise UnsupportedError(f"open {name} first, whose heads are frozen, then PeftModel.from_pretrained")
        with_info = options.pop("output_loading_info", False)
        state, tensors = read_description(_folder(name, places))
        shaped = _shaped(cls, state)
        opened = ordinary(shaped, name, *model_args, config=config, output_loading_info=True, **options)
        model, info = opened
        if any(key.endswith(f".{NAME}.{LAYOUT}") for key in info["missing_keys"]):
            saved = next(iter(model.config.architectures or ()), "another class")
            raise UnsupportedError(f"{cls.__name__} names its layers otherwise: open {name} by {saved}")
        model.__class__ = cls
        _adopt_(model, state, tensors)
        return opened if with_info else model

    return from_pretrained


def _is_marked(cls: Any, config: Any, places: dict[str, Any]) -> bool:
    """Return whether a configuration, or that of a named folder, has frozen or pruned heads."""
    if not isinstance(config, str | Path):
        return mark_of(config) is not None
    if cls.config_class is None:
        return False
    try:
        values, _ = cls.config_class.get_config_dict(config, **places)
    except OSError:  # a folder of an adapter of peft, or nothing, which the ordinary method says
        return False
    return values.get("saf") is not None


def _folder(name: Any, places: dict[str, Any]) -> Path:
    """Return the folder on this machine with both files about the heads of a model; raise where one is missing."""
    places = places | {"_raise_exceptions_for_missing_entries": False}
    files = [cached_file(name, each, **places) for each in (STATE_FILE, TENSORS_FILE)]
    if None in files:
        raise CheckpointError(
            f"{name} must hold {STATE_FILE} and {TENSORS_FILE}, as its configuration has frozen heads: copy them"
        )
    return Path(str(files[0])).parent


def _shaped(cls: Any, state: dict[str, Any]) -> Any:
    """Return a subclass whose models are built with the shapes of a description, for the time of opening one."""

    def init(self: Any, *arguments: Any, **options: Any) -> None:
        cls.__init__(self, *arguments, **options)
        for site, layout in resize_(self, state):
            holder = torch.nn.Module()  # of the layout in the file, compared in `_adopt_`
            holder.register_buffer(LAYOUT, torch.empty(layout.num_heads, 2, dtype=torch.int64))
            site.attention.register_module(NAME, holder)

    names = {name: getattr(cls, name) for name in ("__doc__", "__module__", "__qualname__")}
    return type(cls.__name__, (cls,), names | {"__init__": init})


def _adopt_(model: Any, state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Give a filled model its heads; raise CheckpointError where its weights are of others."""
    sites: list[Any] = list(adapter_for(model).sites())
    if any(weight.is_meta for site in sites for weight, _ in site.projections().values()):
        raise UnsupportedError("attention layers with frozen heads must not be offloaded: give them devices")
    layouts = []
    for site in sites:
        holder = getattr(site.attention, NAME, None)
        layouts.append(None if holder is None else getattr(holder, LAYOUT))
        if holder is not None:
            delattr(site.attention, NAME)
    restore_(model, state, tensors, resized=True)
    for site, layout in zip(sites, layouts, strict=True):
        own = state_of(site.attention)
        compare_layouts(f"layer {site.attention.layer_idx}", None if own is None else own.frozen_layout, layout)
