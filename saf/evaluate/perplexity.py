"""Held-out perplexity over non-overlapping sequential windows, and the file of every token's log-probability."""

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from saf.data import TokenData, begun_with, sequential_windows
from saf.distributed import on_rank0
from saf.errors import DataError, DivergenceError, InputError
from saf.evaluate.paired import window_losses
from saf.evaluate.passes import Progress, model_facts, precision_in_use, run_batches
from saf.machine import device_name
from saf.models.adapter import language_model
from saf.records.files import check_file, file_hash, read_tensors, write_json, write_tensors
from saf.records.result import read_result, result_header

EVALUATION, LOG_PROBS = FILES = ("evaluation.json", "log_probs.safetensors")
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
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure the loss (nats per token) and perplexity of `model` on one partition.

    Processes of a group share the batches out, and all return the record that a single process would.

    The model is a GPT or a causal LM whose call returns an object with `.logits`; it keeps its mode. A window has
    `length` tokens of context, by default the model's maximum, and begins with the token `bos` if given; `limit` stops
    after so many. `precision` is "fp32", "bf16" (autocast), or "auto": bf16 on CUDA, fp32 elsewhere; weights that are
    not float32 run in their own dtype, which the record names. `out` is a folder for `FILES`, which hold every token's
    log-probability with `tokens`, else only the losses of windows. `checkpoints` are hashes for the record's header: of
    the model, and of the one it was frozen from ("parent").

    Raises InputError for a setting out of range or "fp32" for narrower weights, DataError for less than one window or
    token ids that the model does not have, DivergenceError for a log-probability that is not finite.
    """
    language, device = language_model(model), language_model(model).device
    length = _window_length(language, data, length)
    windows = sequential_windows(data.tokens(partition), length, limit)
    windows = windows if bos is None else begun_with(windows, bos)
    ran_in, batches = precision_in_use(model, precision), windows.split(batch_size)

    def log_probs_of(batch: Tensor) -> Tensor:
        batch = batch.to(device)
        return language.token_log_probs(batch[:, :-1], batch[:, 1:]).float().cpu()

    sizes = [len(batch) for batch in batches]
    parts = run_batches(model, log_probs_of, batches, precision=precision, sizes=sizes, progress=progress)
    log_probs = torch.cat(parts)
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
        "precision": ran_in,
        "bos": bos,
        "by_position": losses_by_position(log_probs),
        "data_fingerprint": data.fingerprint,
        "windows_hash": hash_windows(windows),
    }
    if out is None:
        return record
    settings = {"partition": partition, "length": length, "batch_size": batch_size, "limit": limit}
    settings |= {"precision": precision, "bos": bos}
    header = {"device": device_name(device), "checkpoints": checkpoints, "data": {partition: data.fingerprint}}

    def write() -> dict[str, Any]:
        written = {**result_header("evaluation", settings, **header), **record, "of": model_facts(model)}
        written["log_probs_sha256"] = write_losses(Path(out), log_probs, tokens=tokens)
        write_json(Path(out) / EVALUATION, written)
        return written

    return on_rank0(write)


def _window_length(language: Any, data: TokenData, length: int | None) -> int:
    """Return the window length; raise where the model cannot take it, or tokens of the data."""
    longest, vocabulary = language.max_length, language.vocab_size
    length = longest if length is None else length
    if length is None:
        raise InputError("length must be given: the model has no maximum of its own")
    if longest is not None and length > longest:
        raise InputError(f"windows of {length:,} tokens are longer than the model's maximum of {longest:,}")
    if vocabulary is not None and data.vocab_size > vocabulary:
        ids = f"the data's tokenizer has {data.vocab_size:,} ids, the model only {vocabulary:,}"
        raise DataError(f"{ids}; prepare data with the model's tokenizer")
    return length


def losses_by_position(log_probs: Tensor) -> list[list[float]]:
    """Average the loss of targets 1 to 16 of all windows `[windows, T]`, 17 to 64, and so on, fourfold up to T.

    Returns [last target of the range, mean loss in nats] for each. Later targets lose less by what the context says.
    """
    length = log_probs.shape[1]
    ends = [*(end for end in (16 * 4**power for power in range(16)) if end < length), length]
    means = [-float(part.mean(dtype=torch.float64)) for part in torch.tensor_split(log_probs, ends[:-1], dim=1)]
    return [[end, mean] for end, mean in zip(ends, means, strict=True)]


def hash_windows(windows: Tensor) -> str:
    """Hash windows of token ids `[windows, length + 1]` by SHA-256, shape included."""
    digest = hashlib.sha256(f"{list(windows.shape)}".encode())
    digest.update(windows.to(torch.int64).contiguous().numpy().astype("<i8", copy=False).tobytes())
    return digest.hexdigest()


def write_losses(folder: Path, log_probs: Tensor, *, tokens: bool = True) -> str:
    """Write the losses of an evaluation, by log-probabilities `[W, T]`, into a folder and return the file's SHA-256.

    The file holds mean losses of windows, `windows [W]` float64 in nats, and with `tokens` every token's `log_probs`.
    """
    tensors = {"windows": window_losses(log_probs)} | ({"log_probs": log_probs.float()} if tokens else {})
    return file_hash(write_tensors(folder / LOG_PROBS, tensors))


def read_evaluation(folder: Path | str) -> tuple[dict[str, Any], Tensor]:
    """Read evaluation.json and the mean losses of its windows, `[W]` float64 in nats.

    Raises InputError when a file is missing or damaged, or the two are not of one evaluation.
    """
    record, losses = read_result(Path(folder) / EVALUATION), Path(folder) / LOG_PROBS
    check_file(losses, sha256=record["log_probs_sha256"])
    return record, read_tensors(losses)["windows"]
