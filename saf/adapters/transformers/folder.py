"""The folder of a model of transformers whose heads are frozen: `save_pretrained` writes them beside the weights.

Its configuration is marked by the entry `saf`, which names what opens the folder. `README.md` has a section for people:
a map of the heads, and what is known of the events that made them so. What else it says stays.
"""

import hashlib
import json
import re
import warnings
from collections.abc import Collection
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from saf.adapters.adapter import Adapter
from saf.adapters.description import SCHEMA, STATE, TENSORS, described_beside, write_description
from saf.errors import InputError, SafWarning
from saf.heads import HeadLayout
from saf.records.events import heads_in_words
from saf.records.files import StoredTensors, entries_hash, file_hash, tensors_hash, write_atomically
from saf.records.folders import new_files

OPENS = "import saf.integrations.transformers"
"""What makes `from_pretrained` open such a folder."""
CARD, CONFIG = "README.md", "config.json"
UPLOAD = "_upload_modified_files"
"""The method by which models of transformers send what they wrote into a folder to a hub."""
CAUSAL = ("ForCausalLM", "LMHeadModel")
"""How names of models that predict the next token end."""
_BEGIN, _END = "<!-- frozen heads: written by saf -->", "<!-- end of frozen heads -->"
_COST = "- what freezing cost: "
_FRONT = "---\nlibrary_name: transformers\ntags:\n- saf\n---\n\n"
_TITLE = "# A model with frozen attention heads\n"
_MARKS = {"live": ".", "frozen": "F", "pruned": "P"}


def weight_files(folder: Path) -> list[Path]:
    """Return the files of a model's weights, by name; none where the folder has none."""
    names = (*folder.glob("model*.safetensors"), *folder.glob("pytorch_model*.bin"))
    return sorted(names)


def folder_hash(folder: Path) -> str:
    """Return one SHA-256 for a model's configuration, weights and description of heads, each by its own sum.

    What the configuration tells of what freezing cost is left out: it was measured of the model that has this sum.
    """
    files = [folder / CONFIG, *weight_files(folder), folder / STATE, folder / TENSORS]
    sums = {path.name: file_hash(path) for path in files if path.is_file()}
    told = _configuration(folder)
    if (told.get("saf") or {}).pop("cost", None) is not None:
        sums[CONFIG] = hashlib.sha256(_as_saved(told)).hexdigest()
    return entries_hash(sums)


def _configuration(folder: Path) -> dict[str, Any]:
    """Return what a folder's configuration says; nothing where it cannot be read."""
    try:
        told = json.loads((folder / CONFIG).read_bytes())
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}


def _as_saved(told: dict[str, Any]) -> bytes:
    """Return the bytes of a configuration as transformers writes it."""
    return (json.dumps(told, indent=2, sort_keys=True) + "\n").encode()


def weights_hash(model: Any) -> str | None:
    """Return what `tensors_hash` gives for the files of a model's weights; None where some are offloaded.

    Of weights that are tied the files hold one.
    """
    state = model.state_dict()
    if any(tensor.is_meta for tensor in state.values()):
        return None
    told = getattr(model, "all_tied_weights_keys", {})
    tied = {name: source for name, source in told.items() if {name, source} <= state.keys()}
    again = {name for name, source in tied.items() if state[name].data_ptr() == state[source].data_ptr()}
    return tensors_hash({name: tensor for name, tensor in state.items() if name not in again})


def mark_of(config: Any) -> dict[str, Any] | None:
    """Return the entry of a configuration that tells of frozen or pruned heads; None where it has none."""
    return getattr(config, "saf", None)


def mark_(config: Any) -> None:
    """Say in a configuration that heads are frozen or pruned, and what opens its folder."""
    if mark_of(config) is None:
        config.saf = {"schema": SCHEMA, "open_with": OPENS, "events": []}


def tell_of_event_(config: Any, **values: Any) -> None:
    """Add to what a configuration tells of the last event that edited heads."""
    mark_of(config)["events"][-1] |= values  # pyright: ignore[reportOptionalSubscript]


def tell_of_undoing_(config: Any, layer: int, heads: Collection[int]) -> None:
    """Take heads of a layer that were undone out of what a configuration tells of events, and what they all cost."""
    if (marked := mark_of(config)) is None or not heads:
        return
    marked.pop("cost", None)
    for event in marked["events"]:
        left = [pair for pair in event["heads"] if pair[0] != layer or pair[1] not in heads]
        if undone := len(event["heads"]) - len(left):
            fits = [fit for fit in event["fit_kl"] if fit[0] != layer or fit[1] not in heads]
            event |= {"heads": left, "fit_kl": fits, "undone": event.get("undone", 0) + undone}
            event.pop("loss_before", None)
            event.pop("loss_after", None)  # with the heads that are no longer frozen
    marked["events"] = [event for event in marked["events"] if event["heads"]]


def unmark_(config: Any) -> None:
    """Say no more in a configuration that heads are frozen or pruned."""
    vars(config).pop("saf", None)


def watch_owners(part: Any, watched: bool) -> None:
    """Let a model whose heads were frozen through it warn when a model around it is saved, or no longer.

    `save_pretrained` of the model around it knows nothing of heads, and nothing in a model tells what it is part of.
    """
    for number, hook in list(part._state_dict_pre_hooks.items()):
        if hook is warn_of_owner:
            del part._state_dict_pre_hooks[number]
    if watched:
        part.register_state_dict_pre_hook(warn_of_owner)


def warn_of_owner(part: Any, prefix: str, keep_vars: bool) -> None:
    """Warn that the weights about to be read are saved without their heads where transformers' owner reads them."""
    if prefix == f"{part.base_model_prefix}.":
        name = type(part).__name__
        warnings.warn(
            f"heads were frozen through the {name} alone, and save_pretrained of the model around it writes no {STATE} "
            f"and no {TENSORS}, without which its folder does not open: give saf.freeze_ the whole model. For heads "
            "frozen already, saf.save(model, folder) writes both files, from which saf.load freezes a whole model",
            SafWarning,
            stacklevel=2,
        )


def save_with_heads(
    adapter: Adapter, save_directory: str | Path, is_main_process: bool = True, *rest: Any, **options: Any
) -> None:
    """Save a model as its class does, with `saf.json`, `saf.safetensors` and the README's section beside its weights.

    They are pushed to a hub, too, where the class pushes the folder or `push_to_hub` does so afterwards. Weights tell
    in themselves which heads and patterns they belong to, so that those of another moment are refused.
    """
    folder, model = Path(save_directory), adapter.model
    if is_main_process and not folder.is_file():
        state, tensors = described_beside(adapter)
        path, told = folder / CARD, section(adapter)
        if _COST not in told and type(model).__name__.endswith(CAUSAL):  # of a part it was not measured
            (mark_of(model.config) or {}).pop("cost", None)
        card = with_section(path.read_text(encoding="utf-8") if path.is_file() else None, told)
        with new_files(folder) as new:
            write_description(new, state, tensors)
            write_atomically(new / CARD, card.encode())
        setattr(model, UPLOAD, partial(upload_with_heads, adapter, card))
    type(model).save_pretrained(model, save_directory, is_main_process, *rest, **options)


def upload_with_heads(
    adapter: Adapter,
    card: str,
    working_dir: str | Path,
    repo_id: str,
    files_timestamps: dict[str, float],
    **options: Any,
) -> Any:
    """Upload a folder as a model's class does, with the files about heads, and with their section in the model card.

    transformers passes over files that were there before it began to save, and has just written a card over the
    folder's: that of the repository, which gets the section, or a form to fill in where the repository has none, in
    whose place the folder's own card goes, with the tags of the form.
    """
    model, path = adapter.model, Path(working_dir) / CARD
    written = path.read_text(encoding="utf-8")
    own = not _has_card(repo_id, options.get("token"))
    told = _with_tags_of(card, written) if own else with_section(written, section_of(card) or "")
    write_atomically(path, told.encode())
    before = {name: time for name, time in files_timestamps.items() if name not in (STATE, TENSORS, CARD)}
    return getattr(type(model), UPLOAD)(model, working_dir, repo_id, before, **options)


def _has_card(repo_id: str, token: Any) -> bool:
    """Return whether a repository of the hub has a model card, asked as transformers asks for it."""
    from huggingface_hub import ModelCard
    from huggingface_hub.errors import EntryNotFoundError

    try:
        ModelCard.load(repo_id, token=token)
    except EntryNotFoundError:
        return False
    return True


def _with_tags_of(card: str, other: str) -> str:
    """Return a model card with the tags that another one has beside its own."""
    from huggingface_hub import ModelCard

    told: Any = ModelCard(card)
    form: Any = ModelCard(other)
    known = told.data.tags or []
    if not (more := [tag for tag in form.data.tags or [] if tag not in known]):
        return card
    told.data.tags = [*known, *more]
    return str(told)


def holds_heads(folder: Path) -> bool:
    """Return whether the configuration in a folder tells of edited heads; one that cannot be read does not."""
    return "saf" in _configuration(folder)


def forget_heads_(folder: Path) -> None:
    """Take the files about heads, and the card's section, out of a folder whose model was written over."""
    for name in (STATE, TENSORS):
        (folder / name).unlink(missing_ok=True)
    if (card := folder / CARD).is_file():
        write_atomically(card, without_section(card.read_text(encoding="utf-8")).encode())


def without_section(card: str) -> str:
    """Return a model card without its section about frozen heads and what `with_section` began a new card by."""
    rest = re.sub(f"{re.escape(_BEGIN)}.*?{re.escape(_END)}\\n?", "", card, flags=re.DOTALL)
    return rest.replace(_FRONT + _TITLE, "---\nlibrary_name: transformers\n---\n\n# A model\n")


def section_of(card: str) -> str | None:
    """Return the section about frozen heads of a model card; None where it has none."""
    found = re.search(f"{re.escape(_BEGIN)}\\n(.*?){re.escape(_END)}", card, re.DOTALL)
    return None if found is None else found[1]


def with_section(card: str | None, text: str) -> str:
    """Return a model card with its section about frozen heads replaced, or added at its end."""
    whole = f"{_BEGIN}\n{text}{_END}\n"
    if card is None:
        return f"{_FRONT}{_TITLE}\n{whole}"
    found = re.compile(f"{re.escape(_BEGIN)}.*?{re.escape(_END)}\n?", re.DOTALL)
    return found.sub(lambda _: whole, card) if found.search(card) else f"{card.rstrip()}\n\n{whole}"


def tell_cost_(folder: Path, line: str) -> None:
    """Add to the section of a folder's model card what freezing cost, in place of what was told of that before.

    The configuration keeps it with the sum of the weights, so that cards of the model tell it while its weights are
    these; `folder_hash` stays. Weights in another format than safetensors have no such sum. Raises InputError for a
    folder whose card has no section.
    """
    path = folder / CARD
    card = path.read_text(encoding="utf-8") if path.is_file() else ""
    if (told := section_of(card)) is None:
        raise InputError(
            f"{path} has no section about frozen heads to add to; expected the folder that `saf freeze` or "
            "save_pretrained wrote of a model with frozen heads"
        )
    files, values = weight_files(folder), _configuration(folder)
    if values.get("saf") and all(file.suffix == ".safetensors" for file in files):
        values["saf"]["cost"] = {"told": line, "weights": tensors_hash(StoredTensors(files))}
        write_atomically(folder / CONFIG, _as_saved(values))
    kept = re.sub(f"^{re.escape(_COST)}.*\\n\\n?", "", told, flags=re.MULTILINE)
    write_atomically(path, with_section(card, f"{kept}{_COST}{line}\n\n").encode())


def _cost(adapter: Adapter) -> str:
    """Return the line about what freezing cost, empty where it was not measured of the weights that the model has."""
    told = (mark_of(adapter.model.config) or {}).get("cost")
    if told is None or told["weights"] != weights_hash(adapter.model):
        return ""
    return f"{_COST}{told['told']}\n\n"


def section(adapter: Adapter) -> str:
    """Return what a model card says of the heads, in Markdown."""
    layouts = [site.layout for site in adapter.sites()]
    total = sum(layout.num_heads for layout in layouts)
    counts = {kind: len(adapter.heads(kind)) for kind in _MARKS}
    edited = heads_in_words(counts)
    longest = min((site.frozen.max_length for site in adapter.sites() if site.frozen is not None), default=None)
    limit = "" if longest is None else f" It takes inputs of up to {longest} tokens, the length it was calibrated on."
    rows = "\n".join(f"layer {number:3d}  {_map(layout)}" for number, layout in enumerate(layouts))
    # A causal language model opens by its Auto class; another one by its own, since the folder does not tell which.
    own = type(adapter.model).__name__
    opens = "AutoModelForCausalLM" if own.endswith(CAUSAL) else own
    events = "".join(f"- {_told(event)}\n" for event in (mark_of(adapter.model.config) or {}).get("events", ()))
    return (
        f"## Frozen attention heads\n\nOf its {total} attention heads this model has {edited}, a share of "
        f"{(total - counts['live']) / total:.1%}.{limit} This opens the folder:\n\n"
        f"```python\n{OPENS}  # without it, transformers refuses the shapes of the weights\n"
        f"from transformers import {opens}\n\nmodel = {opens}.from_pretrained(folder)\n```\n\n"
        f"A character a head, `.` ordinary, `F` frozen, `P` pruned:\n\n```text\n{rows}\n```\n\n{events}"
        f"{chr(10) if events else ''}{_cost(adapter)}"
    )


def _map(layout: HeadLayout) -> str:
    """Return one character for each head of a layer."""
    marks = {head: mark for kind, mark in _MARKS.items() for head in getattr(layout, kind)}
    return "".join(marks[head] for head in range(layout.num_heads))


def _told(event: dict[str, Any]) -> str:
    """Say in a line what is known of an event that froze or pruned heads."""
    patterns = f", patterns by {event['pattern']}" if event["kind"] == "frozen" else ""
    rate = "" if event.get("rate") is None else f", at a rate of {event['rate']:.1%}"
    chosen = "as named" if event.get("named") else f"by {event['score_name']}"
    heads = "1 head" if len(event["heads"]) == 1 else f"{len(event['heads'])} heads"
    parts = [f"{heads} {event['kind']} {chosen}{rate}{patterns}"]
    if undone := event.get("undone"):
        parts.append(f"{undone} more of the same event {'was' if undone == 1 else 'were'} undone since")
    if event.get("update") is not None:
        parts.append(f"after update {event['update']}")
    text = f" of {event['data']}" if event.get("data") else ""
    begun = ", each begun by the token that begins a text" if event.get("bos") is not None else ""
    parts.append(f"calibrated on {event['num_sequences']} sequences of {event['length']} tokens{text}{begun}")
    if kls := [kl for *_, kl in event["fit_kl"]]:
        parts.append(f"KL of the fits {median(kls):.4f} nats (median), {max(kls):.4f} at most")
    if event.get("loss_before") is not None:
        parts.append(f"held-out loss {event['loss_before']:.4f} nats before, {event['loss_after']:.4f} after")
    return "; ".join(parts) + f" (SHA-256 of the sequences {event['sequences_hash'][:16]})"
