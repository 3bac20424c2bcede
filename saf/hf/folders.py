"""Model folders of transformers for the command line: `TransformersFolder` opens one, and `saf freeze` writes one."""

import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils.hub import cached_file

from saf.data import (
    TextData,
    TokenData,
    Tokenizer,
    calibration_windows,
    prepend_token,
    sequential_windows,
    shuffled_windows,
)
from saf.errors import CheckpointError, DataError, InputError, SafError
from saf.freeze_checkpoint import CheckpointFreezing, FreezingSource, read_windows
from saf.freeze_report import FreezeReport
from saf.healing import Healing, heal_and_compare
from saf.heldout import halves
from saf.hf.attention import config_entry
from saf.hf.families import CAUSAL, FAMILIES
from saf.hf.pretrained import patch_pretrained
from saf.machine import device_name, pick_device
from saf.models.adapter import adapter_for
from saf.opening import Encoder, ModelFiles, OpenedModel, folder_hash, weight_files
from saf.records.files import new_folder, read_json, write_json
from saf.records.result import result_header
from saf.tasks.base import PARENT, Progress, precision_in_use

RECORD = "freezing.json"
"""The file with the settings and hashes of `saf freeze`."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
"""Files that `saf freeze` copies into the new folder unchanged."""


@dataclass(frozen=True)
class TransformersFolder(ModelFiles):
    """A causal language model of transformers, whose files are in `folder`."""

    path: Path
    folder: Path

    @property
    def name(self) -> str:
        return str(self.path)

    @classmethod
    def find(cls, path: Path) -> "TransformersFolder":
        """Return the model in a folder or on the hub; raise InputError where there is no causal language model."""
        if path.is_dir():
            folder = path
            if not weight_files(folder):
                raise InputError(f"{path} has a config.json but no weights, model.safetensors or shards; save it again")
        else:
            with _translate_errors(
                InputError, f"{path} must be a checkpoint, a run, a model's folder or its name on the hub"
            ):
                folder = Path(str(cached_file(str(path), "config.json"))).parent
            for name in TOKENIZER_FILES:  # `data` reads these files, and `saf freeze` copies them
                cached_file(str(path), name, _raise_exceptions_for_missing_entries=False)
        architectures = read_json(folder / "config.json").get("architectures") or []
        if architectures and not any(name.endswith(CAUSAL) for name in architectures):
            raise InputError(f"{path} must hold a causal language model (...ForCausalLM), got {architectures[0]}")
        return cls(path, folder)

    @property
    def hash(self) -> str:
        return folder_hash(self.folder)

    @property
    def parent(self) -> str | None:
        # Of the model that `saf freeze` read; None for other folders, and once the folder has changed.
        record = read_json(self.folder / RECORD) if (self.folder / RECORD).is_file() else {}
        return record["provenance"]["checkpoints"][PARENT] if record.get("model") == self.hash else None

    def model(self, device: torch.device, dtype: torch.dtype | None = None) -> nn.Module:
        """Open the model without attention dropout; raise CheckpointError where its files miss weights."""
        options: dict[str, Any] = dict.fromkeys(self.attention_dropout(), 0.0)
        if dtype is not None:
            options["dtype"] = dtype
        patch_pretrained()
        with _translate_errors(CheckpointError, f"transformers cannot open {self.name}"):
            opened: Any = AutoModelForCausalLM.from_pretrained(self.name, output_loading_info=True, **options)
        model, info = opened
        # transformers only warns, and draws the missing ones at random.
        if missing := sorted(info["missing_keys"]):
            raise CheckpointError(
                f"{self.name} has no values for {len(missing)} weights: {', '.join(missing[:3])}; save it again"
            )
        return model.to(device).eval()

    def config(self) -> Any:
        """Open the configuration; raise CheckpointError where transformers cannot."""
        with _translate_errors(CheckpointError, f"transformers cannot open {self.name}"):
            return AutoConfig.from_pretrained(self.name)

    def attention_dropout(self) -> dict[str, float]:
        """Return the configuration's rates of attention dropout above 0, by field."""
        config, fields = self.config(), sorted({family.dropout for family in FAMILIES})
        return {field: rate for field in fields if (rate := getattr(config, field, 0.0))}

    def encoder(self, data: TokenData | None = None) -> Encoder:
        with _translate_errors(DataError, f"{self.name} has no tokenizer; copy it into the model's folder"):
            tokenizer: Any = AutoTokenizer.from_pretrained(self.name)
        bos = tokenizer.bos_token_id
        first_token = tokenizer.eos_token_id if bos is None else bos  # as lm-eval's own models do
        encode_plain = partial(tokenizer.encode, add_special_tokens=False)
        sample = tokenizer.encode("a")
        # Special tokens before a text only: those behind it would separate a context from its continuation.
        prefix = sample[: sample.index(encode_plain("a")[0])]
        return Encoder(lambda text: [*prefix, *encode_plain(text)], encode_plain, first_token, bos)

    def data(self, path: Path | None) -> TokenData:
        advice = f"`saf data prepare TEXT --tokenizer {self.folder} --out DATA`"
        if path is None:
            raise InputError(f"{self.name} needs --data: a file of text, or a folder by {advice}")
        tokenizer = Tokenizer.load(self.folder)
        if path.is_file():
            return TextData(path, tokenizer)
        data = TokenData.open(path)
        if not tokenizer.same(data.tokenizer()):
            raise DataError(
                f"{path} must have the tokenizer of {self.name}, {tokenizer.fingerprint[:12]}, got "
                f"{data.tokenizer_hash[:12]}; prepare the text again by {advice}"
            )
        return data


def open_folder_source(settings: CheckpointFreezing, say: Callable[[str], Any]) -> FreezingSource:
    """Open a model in a folder, or of the hub, so that `freeze_saved` freezes its heads.

    The new folder has the files of `save_pretrained` and of the tokenizer, the freezing event and `RECORD`. Raises
    InputError where there is no model, or the settings do not fit it.
    """
    config, device = settings.config, pick_device(settings.device)
    if "gradient" in config.needs:
        raise InputError("a model's folder holds no average of Q/K gradients; choose another score")
    source = TransformersFolder.find(settings.checkpoint)
    data = source.data(settings.data)
    if "outputs" in config.needs and isinstance(data, TextData):
        raise InputError(
            f"this score reads held-out text: give --data a folder by `saf data prepare --tokenizer {source.folder}`"
        )
    bos = source.encoder().require_bos(source.name) if settings.bos else None
    dtype = torch.float32 if settings.heal is not None else None  # 16-bit weights round small updates away
    model: Any = source.model(device, dtype)
    parent = source.hash  # after opening, which downloads a model of the hub
    adapter_for(model)  # refuses unsupported families before data are read
    precision = precision_in_use(model, settings.precision)
    for field, rate in source.attention_dropout().items():
        say(f"frozen heads have no attention dropout: {field} was {rate:g} and is 0 in {settings.out}")
    longest = OpenedModel(model, data, source).longest
    windows = _windows(settings, data, settings.calibration_length(longest, most=longest))
    calibration, heldout, training = (each if bos is None else prepend_token(each, bos) for each in windows)

    def heal(heldout: list[Tensor], progress: Progress) -> Healing:
        healing = heal_and_compare(
            model,
            source.model(device, dtype),
            training,
            halves(heldout)[1] if config.uses_joint_cost else heldout,  # the first half chose the heads
            accept_loss=settings.accept_loss,
            precision=settings.precision,
            progress=progress,
        )
        model.to(source.config().dtype or torch.float32)  # saved in the dtype that it came in
        return healing

    def write(report: FreezeReport) -> str:
        # `freeze_` has recorded the event, but knows neither the data's name nor the BOS token.
        event = config_entry(model.config)["events"][-1]
        event |= {"data": data.folder.resolve().name, "bos": bos}
        if report.healing is not None:
            event["healing"] = asdict(report.healing)
        names = ("checkpoint", "data", "bos", "sequences", "batch_size", "precision", "finalize")
        recorded = {name: getattr(settings, name) for name in names}
        recorded |= {"config": config.to_dict(), "length": report.statistics.length}
        recorded["calibration_seed"] = settings.calibration_seed or 0
        record = result_header(
            "freezing",
            recorded,
            device=device_name(device),
            checkpoints={PARENT: parent},
            data={"calibration": data.fingerprint},
        )
        record |= {"precision": precision, "bos": bos}
        with new_folder(settings.out) as folder:
            model.save_pretrained(folder)
            for name in TOKENIZER_FILES:
                if (source.folder / name).is_file():
                    shutil.copyfile(source.folder / name, folder / name)
            report.save(folder)
            # The report has a schema of its own, for events.jsonl.
            values = {**record, "model": folder_hash(folder), **report.to_dict(), "schema": record["schema"]}
            write_json(folder / RECORD, values)
        return values["model"]

    return FreezingSource(
        model=model,
        hash=parent,
        calibration=calibration,
        heldout=heldout,
        write=write,
        heal=None if settings.heal is None else heal,
    )


def _windows(settings: CheckpointFreezing, data: TokenData, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return calibration, held-out and healing windows, each `[N, length]`, from text that does not overlap.

    Healing windows of prepared data are one token longer.
    """
    seed = settings.calibration_seed or 0
    heal = 0 if settings.heal is None else max(1, settings.heal // length)
    if isinstance(data, TextData):
        return _windows_of_text(settings, data, length, heal)
    calibration, heldout = read_windows(settings, data, length, seed=seed)
    if settings.config.uses_joint_cost:  # spread over all documents: heads chosen on one kind of text fail on others
        every = sequential_windows(data.tokens("controller"), length)[:, :-1]
        heldout = every[torch.linspace(0, len(every) - 1, len(heldout)).long()]
    training = shuffled_windows(data.tokens("train"), 0, heal, length=length, seed=seed) if heal else heldout[:0]
    return calibration, heldout, training


def _windows_of_text(
    settings: CheckpointFreezing, data: TextData, length: int, heal: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the windows of `_windows` from one file of text; healing windows repeat where the text is short."""
    count, tokens = settings.sequences, data.num_tokens("train")
    total = tokens // length
    held = settings.heldout_count(total - count, length)
    if total < count + held:
        fewer = f"--sequences {total - held}, " if total > held else ""
        raise DataError(
            f"{data.folder} must have {(count + held) * length:,} tokens ({count:,} sequences of {length:,} to "
            f"calibrate and {held} to measure the loss), got {tokens:,}: pass {fewer}a smaller --length or more text"
        )
    every = calibration_windows(data, length=length, count=total, seed=settings.calibration_seed or 0)
    calibration, heldout, rest = every.split([count, held, total - count - held])
    if heal and not len(rest):
        raise InputError(f"--heal needs more text than the {count + held} sequences that are measured: give more")
    repeats = math.ceil(heal / max(1, len(rest)))
    return calibration, heldout, rest.repeat(repeats, 1)[:heal]


@contextmanager
def _translate_errors(kind: type[SafError], problem: str) -> Iterator[None]:
    """Raise errors of transformers about files as errors of `kind`."""
    try:
        yield
    except SafError:
        raise
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise kind(f"{problem}: {next(iter(str(error).splitlines()), type(error).__name__).strip()}") from error
