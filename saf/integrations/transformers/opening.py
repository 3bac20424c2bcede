"""Opening the folders that `save_pretrained` writes of models with frozen or pruned heads, by `from_pretrained`.

transformers builds a model from its configuration, without weights, then fills it. A frozen head has no rows of queries
and keys, so the empty model is cut to the shapes of the file in between, and told of its heads once it is filled.
"""

from collections.abc import Callable, Collection
from contextvars import ContextVar
from functools import cache, wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.hub import cached_file
from transformers.utils.import_utils import is_peft_available

from saf.adapters import adapter_for
from saf.adapters.description import STATE, TENSORS
from saf.adapters.transformers.attention import state_of
from saf.adapters.transformers.folder import forget_heads_, holds_heads, mark_of
from saf.errors import CheckpointError, UnsupportedError
from saf.frozen_state import adopt_, resize_
from saf.ops.layout import LAYOUT, compare_layouts
from saf.records.files import read_json, read_tensors
from saf.sidecar import check_sums

_HUB = ("cache_dir", "force_download", "proxies", "local_files_only", "token", "revision", "subfolder")
"""Arguments of `from_pretrained` that say where files lie."""
_TOLD = "saf"
"""The name in an attention layer of what tells, and later holds, its heads."""
_HOLDER = f".{_TOLD}.{LAYOUT}"
"""How names of weights that tell a layer's heads end."""
_ANSWERS = "ForQuestionAnswering"
"""How classes end that in some families call their decoder otherwise than the others do."""
_OPENS: ContextVar[bool] = ContextVar("opens", default=False)
"""Whether a folder is being opened here: some classes build the model inside them by `from_config`."""


@cache
def open_frozen_folders() -> None:
    """Let `from_pretrained` of every class of transformers open folders of models with frozen heads, from now on.

    `from_config`, which reads no weights, refuses their configurations. `save_pretrained` of an ordinary model in place
    of one with heads takes the files about these away.
    """
    methods = vars(PreTrainedModel)
    own: Any = PreTrainedModel
    own.from_pretrained = classmethod(_opening(methods["from_pretrained"].__func__))
    own._from_config = classmethod(_building(methods["_from_config"].__func__))
    own.save_pretrained = _saving(methods["save_pretrained"])


def _opening(ordinary: Callable[..., Any]) -> Callable[..., Any]:
    """Return what takes the place of the function under `from_pretrained`, for any other folder the same."""

    @wraps(ordinary)
    def from_pretrained(cls: Any, name: Any, *model_args: Any, config: Any = None, **options: Any) -> Any:
        """Open a marked folder with its heads, and any other one as before."""
        base = None if name is None else _base_of(Path(name))
        if base is not None and _is_marked(cls, base, config, options):
            # As Auto classes do it, which find the model themselves.
            given = options.get("adapter_kwargs") or {}
            name, options["adapter_kwargs"] = base, {"_adapter_model_path": name, **given}
        if name is None and mark_of(config) is not None:
            raise UnsupportedError(
                "the configuration is that of a model with frozen or pruned heads, whose patterns are in its folder, "
                "not in a state_dict: give from_pretrained the folder; or build an ordinary model (del config.saf), "
                "give it the heads by saf.load(model, folder), then the weights by model.load_state_dict(state_dict)"
            )
        if name is None or not _is_marked(cls, name, config, options):
            return ordinary(cls, name, *model_args, config=config, **options)
        if options.get("quantization_config") is not None:
            raise UnsupportedError(
                "a folder with frozen heads is opened in its own weights; quantise the model once it is open"
            )
        told = options.pop("output_loading_info", False)
        folder = _folder(cls, name, options)
        state = read_json(folder / STATE, error=CheckpointError)
        check_sums(folder, state)
        tensors = read_tensors(folder / TENSORS, error=CheckpointError)
        shaped, token = _shaped(cls, state, tensors), _OPENS.set(True)
        try:
            opened = ordinary(shaped, name, *model_args, config=config, output_loading_info=True, **options)
        finally:
            _OPENS.reset(token)
        model, found = opened
        if type(model) is shaped:  # with an adapter of peft it was told before
            _check_names(model, name, found["missing_keys"])
            model.__class__ = cls
            _tell_(model, state, tensors)
        return opened if told else model

    return from_pretrained


def _building(ordinary: Callable[..., Any]) -> Callable[..., Any]:
    """Return what takes the place of the function under `from_config`, for any other configuration the same."""

    @wraps(ordinary)
    def from_config(cls: Any, config: Any, **options: Any) -> Any:
        """Build a model; raise UnsupportedError for the configuration of one with frozen or pruned heads."""
        if mark_of(config) is not None and not _OPENS.get():
            raise UnsupportedError(
                "the configuration is that of a model with frozen or pruned heads, which from_config cannot build: "
                "open its folder by from_pretrained; for an ordinary model of its sizes remove the entry first (del "
                "config.saf)"
            )
        return ordinary(cls, config, **options)

    return from_config


def _saving(ordinary: Callable[..., Any]) -> Callable[..., Any]:
    """Return what takes the place of `save_pretrained`, for a folder without frozen heads the same."""

    @wraps(ordinary)
    def save_pretrained(
        self: Any, save_directory: Any, is_main_process: bool = True, *rest: Any, **options: Any
    ) -> Any:
        """Save a model; one without heads takes what a folder tells of heads away, as it writes their model over.

        Files about heads beside an ordinary model are of somebody else, and stay.
        """
        over = is_main_process and mark_of(self.config) is None and holds_heads(Path(save_directory))
        saved = ordinary(self, save_directory, is_main_process, *rest, **options)
        if over:
            forget_heads_(Path(save_directory))
        return saved

    return save_pretrained


def _base_of(folder: Path) -> str | None:
    """Return what model the adapter of peft in a folder is for; None for anything else, and with a model beside it."""
    path = folder / "adapter_config.json"
    if not is_peft_available() or not path.is_file() or (folder / "config.json").is_file():
        return None
    return read_json(path, error=CheckpointError).get("base_model_name_or_path")


def _is_marked(cls: Any, name: Any, config: Any, options: dict[str, Any]) -> bool:
    """Return whether the configuration that `from_pretrained` would use tells of frozen or pruned heads."""
    if config is None or isinstance(config, str | Path):
        if cls.config_class is None or options.get("gguf_file") is not None:
            return False
        places = {each: options[each] for each in _HUB if each in options}
        values, _ = cls.config_class.get_config_dict(name if config is None else config, **places)
        return values.get("saf") is not None
    return mark_of(config) is not None


def _folder(cls: Any, name: Any, options: dict[str, Any]) -> Path:
    """Return the folder, on this machine, that holds both files about the heads of a model.

    Raises CheckpointError for one without them, which its own configuration or the one that was given tells of.
    """
    places = {each: options[each] for each in _HUB if options.get(each) is not None}
    found = [
        cached_file(name, each, _raise_exceptions_for_missing_entries=False, **places) for each in (STATE, TENSORS)
    ]
    if None in found and not _is_marked(cls, name, None, options):
        raise CheckpointError(
            f"{name}: the config that was given tells of frozen heads, and {STATE} and {TENSORS} are not both there; "
            "open the folder that this config is of, or leave config out"
        )
    if None in found:
        raise CheckpointError(
            f"{name}: config.json tells of frozen heads, and {STATE} or {TENSORS} is missing beside it; copy them from "
            "the folder that save_pretrained wrote"
        )
    return Path(str(found[0])).parent


def _shaped(cls: Any, state: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    """Return a class of models that are built with the shapes of a description, there while one is opened.

    Where `from_pretrained` was given the folder of an adapter of peft, it loads that once the model is filled: the
    model is told of its heads before, as the adapter was made for a model that knows them.
    """

    def init(self: Any, *arguments: Any, **options: Any) -> None:
        """Build the model, cut it, and take the places of what its file tells of the heads."""
        cls.__init__(self, *arguments, **options)
        for site, layout in resize_(self, state):
            holder = torch.nn.Module()
            holder.register_buffer(LAYOUT, torch.empty(layout.num_heads, 2, dtype=torch.int64))
            site.attention.register_module(_TOLD, holder)

    def load_adapter(self: Any, *arguments: Any, **options: Any) -> Any:
        """Give the model its heads and its class, then load the adapter."""
        self.__class__ = cls
        _tell_(self, state, tensors)
        return self.load_adapter(*arguments, **options)

    names = {
        "__init__": init,
        "load_adapter": load_adapter,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    return type(cls.__name__, (cls,), names)


def _check_names(model: Any, name: Any, missing: Collection[str]) -> None:
    """Raise UnsupportedError where a model's class looks for layers with heads by other names than a folder's."""
    own, state = type(model).__name__, model.state_dict()
    layers = [key.removesuffix(_HOLDER) for key in state if key.endswith(_HOLDER)]
    if not layers or not {key for key in state if key.startswith(tuple(layers))} <= set(missing):
        return
    made = next(iter(model.config.architectures or ()), "another class")
    scores = (
        ", by AutoModel, or by AutoModelForTokenClassification, which with num_labels=2 has the same two scores a token"
    )
    raise UnsupportedError(
        f"{name} was saved of {made} with frozen or pruned heads, and {own} finds none of their layers there, which it "
        f"calls {layers[0]!r} and the like: all of its weights would be drawn anew. Open the folder by {made}"
        f"{scores if own.endswith(_ANSWERS) and not made.endswith(_ANSWERS) else ''}"
    )


def _tell_(model: Any, state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Give a filled model its heads.

    Raises CheckpointError where its weights tell of others, UnsupportedError where they are offloaded.
    """
    sites: list[Any] = list(adapter_for(model).sites())
    for site in sites:
        if any(weight.is_meta for weight, _ in site.projections().values()):
            raise UnsupportedError(
                f"device_map offloads layer {site.attention.layer_idx}, whose weights are in memory during its passes "
                "alone; a model with frozen heads is opened whole: give its attention layers devices, or a narrower "
                "dtype that fits"
            )
    told = [_taken(site.attention) for site in sites]
    adopt_(model, state, tensors)
    for site, found in zip(sites, told, strict=True):
        own = state_of(site.attention)
        compare_layouts(f"layer {site.attention.layer_idx}", None if own is None else own.frozen_layout, found)


def _taken(attention: Any) -> Tensor | None:
    """Return what a layer's weights told of its heads, and take it out of the layer."""
    holder = getattr(attention, _TOLD, None)
    if holder is None:
        return None
    delattr(attention, _TOLD)
    return getattr(holder, LAYOUT)
