"""`TextTask` pretrains on text; `evaluate_perplexity` measures any model on held-out text, token by token.

An evaluation has two files: evaluation.json, and log_probs.safetensors, by which `saf.compare` pairs two models.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from saf.data import TokenData, calibration_windows, prepend_token, random_windows, sequential_windows, shuffled_windows
from saf.distributed import on_rank0
from saf.errors import DataError, DivergenceError, InputError
from saf.machine import Execution, device_name
from saf.models import GPT
from saf.models.adapter import language_model, longest_input
from saf.records.files import check_file, file_hash, read_tensors, write_json, write_tensors
from saf.records.result import read_result, result_header
from saf.tasks.base import Progress, Task, model_facts, precision_in_use, run_batches

SAMPLERS = {"shuffled": shuffled_windows, "random": random_windows}
EVALUATION, LOG_PROBS = EVALUATION_FILES = ("evaluation.json", "log_probs.safetensors")


class TextTask(Task):
    """Predict every next token of the training partition.

    Calibration reads the partition that the settings name, by default the one that the folder was prepared for
    (`calibration`, or `train` where none is held out for it); decisions during a run read the controller partition, the
    final report the report partition.
    """

    name = "text"

    def __init__(self, settings: Any, *, length: int):
        """Open the data folder for windows of `length` tokens; raise DataError when it cannot be used."""
        self.settings, self.length = settings, length
        self.data = TokenData.open(settings.data)
        self.vocab_size, self.tokenizer_hash = self.data.vocab_size, self.data.tokenizer_hash
        self.fingerprint = self.data.fingerprint

    def check(self, *, calibrates: bool, scores_outputs: bool) -> None:
        super().check(calibrates=calibrates, scores_outputs=scores_outputs)
        # Too little held-out text would otherwise be found at the first evaluation, or after the training.
        for partition, count in (("controller", 1), ("report", self._report_windows or 1)):
            if (windows := len(sequential_windows(self.data.tokens(partition), self.length, count))) < count:
                most = f"at most the partition's {windows * self.length:,}, got {count * self.length:,}"
                raise DataError(f"report_tokens must be {most}; prepare more held-out text")

    def batch(self, position: int, size: int) -> Tensor:
        sample, tokens = SAMPLERS[self.settings.sampler], self.data.tokens("train")
        windows = sample(tokens, position, size, length=self.length, seed=self.settings.seed)
        return torch.stack([windows[:, :-1], windows[:, 1:]])

    def calibration(self) -> list[Tensor]:
        settings = self.settings
        source = None if settings.calibration_source == "auto" else settings.calibration_source
        count = settings.calibration_sequences
        windows = calibration_windows(self.data, length=self.length, count=count, seed=settings.seed, source=source)
        return list(windows.split(settings.batch_size))

    def heldout(self) -> list[Tensor]:
        windows = heldout_windows(self.data, length=self.length, count=self.settings.heldout_sequences)
        return list(windows.split(self.settings.batch_size))

    @property
    def _report_windows(self) -> int | None:
        """Number of windows to report on; None is all."""
        if (tokens := self.settings.report_tokens) is None:
            return None
        if tokens < self.length:
            raise InputError(f"report_tokens must be at least one window of {self.length:,} tokens, got {tokens:,}")
        return tokens // self.length

    def controller_loss(self, model: GPT, execution: Execution, count: int) -> float:
        record = evaluate_perplexity(
            model,
            self.data,
            partition="controller",
            length=self.length,
            batch_size=self.settings.batch_size,
            limit=count,
            precision=execution.precision,
        )
        return record["loss"]

    def report(
        self, model: GPT, execution: Execution, *, folder: Path, checkpoints: dict[str, str | None]
    ) -> dict[str, Any]:
        record = evaluate_perplexity(
            model,
            self.data,
            length=self.length,
            batch_size=self.settings.batch_size,
            limit=self._report_windows,
            precision=execution.precision,
            out=folder,
            tokens=self.settings.token_losses,
            checkpoints=checkpoints,
        )
        # The loss of a model that knows nothing but how often each token comes: comparisons name runs that end above.
        entropy = self.data.index["partitions"]["report"]["unigram_entropy"]
        return {"report_loss": record["loss"], "report_perplexity": record["perplexity"], "unigram_entropy": entropy}


def heldout_windows(data: TokenData, *, length: int, count: int) -> Tensor:
    """Read the last `count` windows of the controller partition, int64 `[count, length]`; DataError for fewer."""
    # Evaluations during a run read the first windows: scores should not choose heads by the text that judges them.
    windows = sequential_windows(data.tokens("controller"), length)
    if len(windows) < count:
        few = f"the controller partition must have {count} held-out windows of {length:,} tokens, got {len(windows)}"
        raise DataError(f"{few}; use fewer (heldout_sequences), or prepare more text")
    return windows[-count:, :-1]


# --- perplexity


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
    """Measure the loss (nats per token) and perplexity of a GPT or causal LM on one partition; it keeps its mode.

    Processes of a group share the batches out, and all return the record that a single process would.

    A window has `length` tokens of context, by default the model's maximum, and begins with the token `bos` if there is
    one; `limit` stops after so many windows. `precision` is "fp32", "bf16" (autocast), or "auto": bf16 on CUDA, fp32
    elsewhere. Weights that are not float32 run in their own dtype, which the record names. `out` is a folder for
    `EVALUATION_FILES`; with `tokens` they hold every token's log-probability, else only the mean losses of windows.
    `checkpoints` are hashes for the record's header: of the model, and of the one it was frozen from ("parent").

    Raises InputError for a setting out of range or "fp32" for narrower weights, DataError for less than one window or
    token ids that the model does not have, DivergenceError for a log-probability that is not finite.
    """
    length = _window_length(model, data, length)
    windows = sequential_windows(data.tokens(partition), length, limit)
    windows = windows if bos is None else prepend_token(windows, bos)
    ran_in = precision_in_use(model, precision)  # before the work, since it refuses some
    log_probs = _log_probs(model, windows.split(batch_size), precision=precision, progress=progress)
    # In float64: two models may differ by a thousandth of a nat, over millions of tokens.
    loss = -float(log_probs.mean(dtype=torch.float64))
    if not math.isfinite(loss):
        raise DivergenceError(f"the loss on partition {partition!r} is {loss}: the model's outputs are not finite")
    record = {
        "partition": partition,
        "windows": len(windows),
        "length": length,
        "tokens": log_probs.numel(),
        "loss": loss,
        "perplexity": math.exp(loss) if loss < 709.78 else math.inf,  # above, math.exp raises OverflowError
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
    device = device_name(language_model(model).device)

    def write() -> dict[str, Any]:
        fingerprints = {partition: data.fingerprint}
        header = result_header("evaluation", settings, device=device, checkpoints=checkpoints, data=fingerprints)
        written = {**header, **record, "of": model_facts(model)}
        written["log_probs_sha256"] = write_losses(Path(out), log_probs, tokens=tokens)
        write_json(Path(out) / EVALUATION, written)
        return written

    return on_rank0(write)


def _log_probs(
    model: nn.Module, batches: Sequence[Tensor], *, precision: str, progress: Progress | None = None
) -> Tensor:
    """Return the log-probability of every target of batches of windows `[B, length + 1]`, `[windows, length]`."""
    language = language_model(model)

    def run(batch: Tensor) -> Tensor:
        batch = batch.to(language.device)
        # Four bytes a token, whatever the vocabulary: 20 MB for the paper's largest partition.
        return language.token_log_probs(batch[:, :-1], batch[:, 1:]).float().cpu()

    sizes = list(map(len, batches))
    return torch.cat(run_batches(model, run, batches, precision=precision, sizes=sizes, progress=progress))


def _window_length(model: nn.Module, data: TokenData, length: int | None) -> int:
    """Return the window length; raise where the model cannot take it, or tokens of the data."""
    longest, vocabulary = longest_input(model), language_model(model).vocab_size
    if (length := longest if length is None else length) is None:
        raise InputError("length must be set: the model has no maximum of its own")
    if longest is not None and length > longest:
        too_long = f"windows of {length:,} tokens are longer than the model's maximum of {longest:,}"
        raise InputError(f"{too_long}: lower length")
    if vocabulary is not None and data.vocab_size > vocabulary:
        ids = f"the data's tokenizer has {data.vocab_size:,} ids, the model only {vocabulary:,}"
        raise DataError(f"{ids}; prepare data with the model's tokenizer")
    return length


def losses_by_position(log_probs: Tensor) -> list[list[float]]:
    """Average the loss of targets 1 to 16 of all windows `[windows, T]`, 17 to 64, and so on, fourfold up to T.

    Returns [last target of the range, mean loss in nats] for each: how fast it falls is what the model has of context.
    """
    length = log_probs.shape[1]
    powers = (16 * 4**power for power in range(16))
    ends = [*(end for end in powers if end < length), length]
    means = [-float(part.mean(dtype=torch.float64)) for part in torch.tensor_split(log_probs, ends[:-1], dim=1)]
    return [[end, mean] for end, mean in zip(ends, means, strict=True)]


def hash_windows(windows: Tensor) -> str:
    """Hash windows of token ids `[windows, length + 1]` by SHA-256, shape included."""
    # The shape too: the same tokens in windows of another length give other losses.
    digest = hashlib.sha256(f"{list(windows.shape)}".encode())
    digest.update(windows.to(torch.int64).contiguous().numpy().astype("<i8", copy=False).tobytes())
    return digest.hexdigest()


def window_losses(log_probs: Tensor) -> Tensor:
    """Average log-probabilities `[windows, T]` to the loss of each window, `[windows]` float64 nats.

    Raises DivergenceError where one is not finite: tables would show it as a window that was not measured.
    """
    losses = -log_probs.mean(dim=1, dtype=torch.float64)
    if bad := int((~losses.isfinite()).sum()):
        raise DivergenceError(f"the losses of {bad} of {len(losses)} windows are not finite")
    return losses


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
    check_file(losses, sha256=record["log_probs_sha256"])  # two evaluations into one folder may have left one file each
    return record, read_tensors(losses)["windows"]
