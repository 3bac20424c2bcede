"""Held-out perplexity over non-overlapping sequential windows, with every token's log-probability kept."""

import hashlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from saf.calibration.capture import evaluation_mode
from saf.data import TokenData, begun_with, sequential_windows
from saf.distributed import map_over_ranks, on_rank0, rank_and_size
from saf.errors import DataError, DivergenceError, InputError
from saf.evaluate.evaluated import facts_of, precision_in_use
from saf.evaluate.tokens import FILE, TokenLosses
from saf.machine import autocast, device_name
from saf.models.adapter import language_model
from saf.records.files import check_file, write_json
from saf.records.result import read_result, result_header

WRITTEN = ("evaluation.json", FILE)
"""Files that an evaluation writes."""


def evaluate_perplexity(
    model: nn.Module,
    data: TokenData,
    *,
    partition: str = "report",
    length: int | None = None,
    batch_size: int = 8,
    limit: int | None = None,
    precision: str = "auto",
    bos: int | None = None,
    out: Path | str | None = None,
    tokens: bool = True,
    checkpoints: Mapping[str, str | None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Measure the loss (nats per token) and perplexity of `model` on one partition.

    In a `torch.distributed` group every process calls this with the same model. Batches are shared out among them, and
    all return the same record, the one that a single process would; the first one writes.

    Args:
        model: The project's GPT, or a causal LM whose call returns an object with `.logits`; left in the mode it had.
        data: A prepared data folder.
        partition: Which held-out text; final numbers come from "report".
        length: Tokens of context in a window; the model's maximum when None.
        batch_size: Windows in a forward pass.
        limit: Stop after this many windows; None reads the partition.
        precision: "fp32", "bf16" (autocast), or "auto": bf16 on CUDA, fp32 elsewhere. Weights that are not float32
            run in their own dtype, which the record names.
        bos: The token that every window begins with, before its `length` targets; None for none, as the text is.
        out: Folder for the files `WRITTEN`; nothing is written when None.
        tokens: Whether every token's log-probability is written, or the losses of windows alone.
        checkpoints: Hashes by role for the result's header: of the model, and of what it was made from ("parent",
            "parent of parent").
        progress: Called with (windows done, windows) after each batch.

    Raises:
        InputError: A setting out of range, longer windows than the model takes, or "fp32" for narrower weights.
        DataError: Less than one window of text, or token ids the model does not have.
        DivergenceError: A log-probability that is not finite.
    """
    language, device = language_model(model), language_model(model).device
    length = _check_settings(language, data, length=length, batch_size=batch_size, bos=bos)
    windows = sequential_windows(data.tokens(partition), length, limit)
    windows = windows if bos is None else begun_with(windows, bos)
    used, done = precision_in_use(model, precision), 0

    def log_probs_of(batch: Tensor) -> Tensor:
        """The log-probability of every target of some windows."""
        nonlocal done
        batch = batch.to(device)
        log_probs = language.token_log_probs(batch[:, :-1], batch[:, 1:]).float().cpu()
        done += rank_and_size()[1] * len(batch)
        if progress is not None:
            progress(min(done, len(windows)), len(windows))
        return log_probs

    with evaluation_mode(model), torch.no_grad(), autocast(device, precision):
        log_probs = torch.cat(map_over_ranks(log_probs_of, windows.split(batch_size)))
    loss = -float(log_probs.mean(dtype=torch.float64))
    if not math.isfinite(loss):
        raise DivergenceError(f"the loss on partition {partition!r} is {loss}: the model's outputs are not finite")
    record = {
        "partition": partition,
        "windows": len(windows),
        "length": length,
        "tokens": log_probs.numel(),
        "loss": loss,
        "perplexity": math.exp(loss) if loss < 709.78 else math.inf,  # the largest float is exp(709.78...)
        "precision": used,
        "bos": bos,
        "by_position": losses_by_position(log_probs),
        "data_fingerprint": data.fingerprint,
        "windows_hash": hash_windows(windows),
    }
    if out is None:
        return record
    settings = {"partition": partition, "length": length, "batch_size": batch_size, "limit": limit}
    settings |= {"precision": precision, "bos": bos}
    where = {"device": device_name(device), "checkpoints": checkpoints, "data": {partition: data.fingerprint}}

    def write() -> dict[str, Any]:
        """Write both files and return the record with its header."""
        losses = TokenLosses.of(log_probs, tokens=tokens)
        head = result_header("evaluation", settings, **where)
        written = {**head, **record, "of": facts_of(model), "log_probs_sha256": losses.write(Path(out))}
        written |= {"log_probs_step": losses.step} if tokens else {}
        write_json(Path(out) / WRITTEN[0], written)
        return written

    return on_rank0(write)


def read_evaluation(folder: Path | str) -> tuple[dict[str, Any], TokenLosses]:
    """Read evaluation.json and the losses of its windows and tokens.

    Raises InputError when a file is missing or damaged, or the two are not of one evaluation.
    """
    table, values = (Path(folder) / name for name in WRITTEN)
    record = read_result(table)
    if "log_probs_sha256" not in record:
        raise InputError(
            f"{table} has no SHA-256 of {values.name}; `saf evaluate` the run's last checkpoint into another folder, "
            "and copy both files here"
        )
    check_file(values, sha256=record["log_probs_sha256"])
    losses = TokenLosses.read(values)
    losses.check(values, windows=record["windows"], length=record["length"], loss=record["loss"])
    return record, losses


def losses_by_position(log_probs: Tensor) -> list[list[float]]:
    """Mean loss, nats, of targets 1 to 16 of all windows, 17 to 64, and so on, each with the last of its range.

    The ranges grow fourfold up to all `T` of `[windows, T]`. Later ones lose less by what the context tells.
    """
    length = log_probs.shape[1]
    ends = [*(end for end in (16 * 4**power for power in range(16)) if end < length), length]
    means = [-float(part.mean(dtype=torch.float64)) for part in torch.tensor_split(log_probs, ends[:-1], dim=1)]
    return [[end, mean] for end, mean in zip(ends, means, strict=True)]


def hash_windows(windows: Tensor) -> str:
    """SHA-256 of windows of token ids `[windows, length + 1]`, shape included."""
    digest = hashlib.sha256(f"{list(windows.shape)}".encode())
    digest.update(windows.to(torch.int64).contiguous().numpy().astype("<i8", copy=False).tobytes())
    return digest.hexdigest()


def _check_settings(language: Any, data: TokenData, *, length: int | None, batch_size: int, bos: int | None) -> int:
    """Return the window length; raise before any work when a setting cannot be used."""
    if batch_size < 1:
        raise InputError(f"batch_size must be at least 1, got {batch_size}")
    longest, known = language.max_length, language.vocab_size
    length = longest if length is None else length
    if length is None:
        raise InputError("length must be given: the model does not tell its maximum")
    if longest is not None and length > longest:
        raise InputError(f"windows of {length:,} tokens are longer than the model's maximum of {longest:,}")
    if bos is not None and not 0 <= bos < (known or math.inf):
        raise InputError(f"bos must be a token of the model, which has {known:,}, got {bos}")
    if known is not None and data.vocab_size > known:
        raise DataError(
            f"the data's tokenizer has {data.vocab_size:,} ids, the model only {known:,}; evaluate with data prepared "
            "by the tokenizer the model was trained with"
        )
    return length
