"""Tables of the committed benchmark records, as DataFrames of text beside the paper's numbers.

Where two records measured the same point and arm on the same device, the newest accepted measurement stands.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from experiments import paper
from saf.bench.models import TRANSFORMERS, shape_of
from saf.bench.protocol import PRUNED
from saf.bench.timing import GRAPH
from saf.models.gpt import PRESETS
from saf.ops.fused.op import are_few
from saf.records.files import read_json
from saf.records.table import MISSING, natural_order, number, seconds
from saf.report.benchmarks import SPEEDS, means, memory_cells, shape, speed_cells, way

Record = Mapping[str, Any]
Cells = dict[str, Any]
_USUAL_LAYER = (12, 12, 64)
"""Query heads, KV heads and channels of a layer of the 124M model; another layer is named."""


@dataclass(frozen=True)
class Benchmark:
    """A committed record: its name in tables, and its device where most records are of another."""

    name: str
    record: Record
    device: str = ""


def read_benchmarks(results: Path) -> list[Benchmark]:
    """Return the benchmark records of a folder of results, by name in natural order."""
    paths = sorted((results / "bench").glob("*.json"), key=lambda path: natural_order(path.as_posix()))
    records = {path.stem: read_json(path) for path in paths}
    devices = pd.Series([record["provenance"].get("device") for record in records.values()])
    usual = devices.mode()[0]
    return [
        Benchmark(name, record, "" if device in (usual, None) else _short(device))
        for (name, record), device in zip(records.items(), devices, strict=True)
    ]


def _short(device: str) -> str:
    """Return a GPU's name without its maker's and its memory."""
    return re.sub(r"[\s-]\d+\s?GB\b.*", "", device.removeprefix("NVIDIA "))


def superseded(benchmarks: Sequence[Benchmark]) -> list[str]:
    """Return the names of speed records of whose measurements each stands newer in another one."""
    measured = [each for kind in SPEEDS for each in (*_speed_lines(benchmarks, kind), *_memory_lines(benchmarks, kind))]
    standing = {each["in"] for each in _newest(measured)}
    return sorted({each["in"] for each in measured} - standing)


def _newest(lines: Iterable[Cells]) -> list[Cells]:
    """Return the lines whose measurement no other has newer; a refused one never replaces an accepted one."""
    lines = list(lines)
    best: dict[Any, tuple[Any, int]] = {}
    for place, line in enumerate(lines):
        best[line["_key"]] = max(best.get(line["_key"], (line["_order"], place)), (line["_order"], place))
    return [line for place, line in enumerate(lines) if best[line["_key"]][1] == place]


def frame(lines: Iterable[Cells], words: Sequence[str]) -> pd.DataFrame:
    """Return lines as a table of text without empty columns, its index made of the columns that are `words`."""
    shown = [{name: value for name, value in line.items() if not name.startswith("_")} for line in lines]
    table: Any = pd.DataFrame(shown).fillna(MISSING)
    table = table[[name for name in table if not (table[name] == MISSING).all()]]
    words = [name for name in words if name in table]
    table.index = pd.Index(table[words].agg("; ".join, axis=1), name="; ".join(words))
    return table.drop(columns=words)


def speeds(benchmarks: Sequence[Benchmark], kind: str) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield the table of each way of running that records of a kind measured, with its title."""
    order = ("length", "batch_size", "accumulation")
    lines = sorted(
        _newest(_speed_lines(benchmarks, kind)),
        key=lambda line: (*(line["_row"]["point"].get(name, 0) for name in order), line["_row"]["baseline"]),
    )
    for title in dict.fromkeys(line["_way"] for line in lines):
        chosen = [dict(line) for line in lines if line["_way"] == title]
        if len({line["baseline"] for line in chosen}) == 1:
            chosen = [{**line, "baseline": MISSING} for line in chosen]
        yield title, frame(chosen, ("point", "baseline", "arm"))


def _speed_lines(benchmarks: Sequence[Benchmark], kind: str) -> Iterator[Cells]:
    for place, each in enumerate(benchmarks):
        record = each.record
        if record["kind"] != kind:
            continue
        unusual = unusual_settings(each)
        for row, cells in speed_cells(record):
            quoted = _PAPER[kind](record, row) if row["backend"] and kind in _PAPER else None
            pinned = "kernel pinned" * (kind == "prefill" and _is_pinned(row))
            arms = [row["baseline"], row["arm"]]
            # PyTorch's choice is cuDNN wherever a profile was taken, but an arm may be that choice itself.
            alike = [
                re.sub(" auto$", " cudnn", arms[0]),
                re.sub(" auto$", " cudnn", arms[1]) if row["backend"] else arms[1],
            ]
            key = (record["provenance"].get("device"), unusual, way(row), *row["point"].items(), *alike, pinned)
            yield {
                **cells,
                "arm": ", ".join(filter(None, [cells["arm"], pinned])),
                "paper": quoted or MISSING,
                "in": each.name,
                "_row": row,
                "_way": way(row, unusual),
                "_key": key,
                "_order": (not row["refused"], str(record["provenance"].get("date")), place),
            }


def memory(benchmarks: Sequence[Benchmark], kind: str) -> pd.DataFrame | None:
    """Return the peak memory of arms that records of a kind measured; None without any."""
    lines = _newest(_memory_lines(benchmarks, kind))
    return frame(lines, ("model", "point", "arm")) if lines else None


def _memory_lines(benchmarks: Sequence[Benchmark], kind: str) -> Iterator[Cells]:
    for place, each in enumerate(benchmarks):
        record = each.record
        for entry in record["memory"] if record["kind"] == kind else ():
            model = ", ".join(filter(None, [_model(record), unusual_settings(each)]))
            quoted = _update_memory(record, entry) if kind == "update" else None
            key = (record["provenance"].get("device"), model, *entry["point"].items(), entry["arm"], "memory")
            order = (True, str(record["provenance"].get("date")), place)
            yield {
                "model": model,
                **memory_cells(record, entry),
                "paper": quoted or MISSING,
                "in": each.name,
                "_key": key,
                "_order": order,
            }


def _model(record: Record) -> str:
    layers = record["settings"].get("num_layers")
    return f"{record['settings'].get('model')}" + ("" if layers is None else f", {layers} layers")


def unusual_settings(each: Benchmark) -> str:
    """Return which settings make a record's rows other measurements than the usual ones would; "" for none."""
    record, settings, provenance = each.record, each.record["settings"], each.record["provenance"]
    driver, usual, words = (
        provenance.get("driver"),
        "off" if record["kind"] in ("finetune", "attention") else "auto",
        [],
    )
    if record["kind"] == "op":
        layers = {tuple(row["layer"].values()) for row in record["rows"] if row.get("layer")} - {_USUAL_LAYER}
        words += [f"{heads} heads of {dim}, {kv_heads} of keys" for heads, kv_heads, dim in layers]
        words += ["whole groups frozen"] * bool(settings.get("whole_groups"))
    placed = {"even": "as many heads in every layer frozen", "groups": "whole groups frozen"}
    words.append(placed.get(settings.get("placement", ""), ""))
    if settings.get("per_layer"):
        words.append(f"{' '.join(map(str, settings['per_layer']))} heads of the layers frozen")
    setting = settings.get("compile", usual)
    is_compiled = [one == "on" or (one == "auto" and bool(driver)) for one in (setting, usual)]
    if setting == "layers":
        words.append("compiled by layers")
    elif is_compiled[0] != is_compiled[1]:
        words.append("compiled" if is_compiled[0] else "not compiled")
    words += ["layers computed again"] * bool(settings.get("activation_checkpointing"))
    if settings.get("parallel", "none") != "none":
        processes = provenance.get("processes", 1)
        words.append(f"{settings['parallel']}, {processes} process{'es' * (processes > 1)}")
    words += ["processes of their own"] * bool(settings.get("fresh"))
    if settings.get("dtype", "auto") not in ("auto", "bf16" if driver else "fp32"):
        words.append(settings["dtype"])
    return ", ".join(filter(None, [*words, f"on {each.device}" * bool(each.device)]))


def _is_pinned(row: Record) -> bool:
    """Return whether pinning a kernel takes a launch from a frozen layer, which takes one for few tokens.

    Such rows are no measure of a model left to PyTorch's choice of kernel.
    """
    name, point = row["model"].split(",")[0], row["point"]
    if row["backend"] != "toeplitz" or row["kernel"] == "auto" or point.get("precision") == "fp32":
        return False
    if name not in PRESETS and name not in TRANSFORMERS:
        return False
    sizes = shape_of(name, point["length"])
    values = torch.empty(point["batch_size"], sizes.num_kv_heads, point["length"], sizes.head_dim, device="meta")
    return are_few(values, sizes.num_heads, replayed=row["variant"] == GRAPH)


# --- the paper's numbers at the same shapes


def _point(row: Record) -> tuple[str, int, int]:
    return row["model"], row["point"]["length"], row["point"]["batch_size"]


def _update(record: Record, row: Record) -> str | None:
    if row["variant"].endswith(f" {GRAPH}"):
        return None  # the paper replayed no update
    together = record["provenance"].get("processes", 1) > 1
    return paper.update_speed(_point(row), row["rate"], pruned=row["backend"] == PRUNED, together=together)


def _update_memory(record: Record, entry: Record) -> str | None:
    point = (_model(record), entry["point"]["length"], entry["point"]["batch_size"])
    return paper.update_memory(point, entry["rate"], pruned=entry["backend"] == PRUNED)


def _prefill(record: Record, row: Record) -> str | None:
    graph = row["variant"] == GRAPH
    return paper.prefill_speed(_point(row), row["rate"], graph=graph, pruned=row["backend"] == PRUNED)


def _op(record: Record, row: Record) -> str | None:
    layer, point = row["layer"], row["point"]
    qwen = (layer["num_heads"], layer["num_kv_heads"], layer["head_dim"]) == (32, 8, 128)
    forward = row["part"] == "layer" and row["variant"].startswith("forward")
    return paper.attention_speed(point["length"], point["batch_size"], row["rate"]) if qwen and forward else None


_PAPER: dict[str, Callable[[Record, Record], str | None]] = {"update": _update, "prefill": _prefill, "op": _op}


# --- other kinds


def finetuning(benchmarks: Sequence[Benchmark]) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield means over the orders of examples: a table a task, and one where passes were replayed as graphs."""
    for each in benchmarks:
        for graphed in (False, True) if each.record["kind"] == "finetune" else ():
            lines = []
            for row, cells in means(each.record, graphed=graphed):
                quoted = None
                if row["model"] == "124m" and row["role"] == "frozen":
                    quoted = paper.finetuning(row["variant"].split()[0], row["rate"])
                lines.append({**cells, "paper": quoted or MISSING})
            if lines:
                title = f"{each.record['rows'][0]['model']}, {each.record['settings']['task']}: mean over the orders"
                yield title + ", passes replayed as CUDA graphs" * graphed, frame(lines, ("arm",))


def _rows(benchmarks: Sequence[Benchmark], kind: str, part: str | None = None) -> Iterator[tuple[Benchmark, Record]]:
    for each in benchmarks:
        if each.record["kind"] == kind:
            yield from ((each, row) for row in each.record["rows"] if part in (None, row.get("part")))


def _speedup(row: Record, name: str = "speedup") -> Cells:
    refused = row["refused"]
    return {
        name: "refused" if refused else f"{row['ratio']:.3f}×",
        "middle half of pairs": MISSING if refused else f"{row['q25']:.3f} to {row['q75']:.3f}",
        "pairs": number(row["pairs"]),
        "control": MISSING if row["control_ratio"] is None else f"{row['control_ratio']:.4f}",
    }


def nanogpt(benchmarks: Sequence[Benchmark]) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield the table of ordinary updates beside nanoGPT's."""
    lines = [
        {
            "model": row["model"],
            "point": shape(row["point"]),
            "nanoGPT, ms": number(row["baseline_ms"]),
            "ours, ms": number(row["arm_ms"]),
            **_speedup(row),
            "nanoGPT, tokens/s": f"{row['baseline_tokens_per_second']:,.0f}",
            "ours, tokens/s": f"{row['arm_tokens_per_second']:,.0f}",
            "in": each.name,
        }
        for each, row in _rows(benchmarks, "nanogpt")
        if not row["control"]
    ]
    yield "", frame(lines, ("model", "point"))


def compilation(benchmarks: Sequence[Benchmark]) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield what an event costs in compilation, and updates of models compiled whole and by layers."""
    forms = {"whole": "the whole model", "layers": "by decoder layers"}
    caches = {"empty": "empty", "ahead": "filled ahead", "warm": "of an earlier process"}  # the last two of old records
    where = lambda row: {"model": row["model"], "point": shape(row["point"])}  # noqa: E731
    events = [
        {
            **where(row),
            "compiled": forms[row["form"]],
            "cache on disk": caches[row["caches"]],
            "event": row["event"],
            "heads frozen": number(row["frozen"]),
            "lost": seconds(row["lost_s"]),
            "first update": seconds(row["first_s"]),
            "update after it": seconds(row["update_s"]),
            "in": each.name,
        }
        for each, row in _rows(benchmarks, "compile", "event")
    ]
    yield "", frame(events, ("model", "point", "compiled", "cache on disk", "event"))
    pairs = []
    for each, row in _rows(benchmarks, "compile", "pair"):
        busy = {f"kernels {form.replace('layers', 'by layers')}": row.get("busy", {}).get(form) for form in forms}
        kernels = {name: f"{number(one['kernels'])}, {number(one['ms'])} ms" for name, one in busy.items() if one}
        times = {"whole, ms": number(row["baseline_ms"]), "by layers, ms": number(row["arm_ms"])}
        if not row.get("control"):
            share = {"frozen": f"{100 * row['rate']:g}%"}
            pairs.append(
                {**where(row), **share, **times, **_speedup(row, "whole / by layers"), **kernels, "in": each.name}
            )
    yield "Updates compiled whole and by layers", frame(pairs, ("model", "point"))


def freezing(benchmarks: Sequence[Benchmark]) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield the warm seconds of interventions and of fits, and of dense collection as their baseline."""
    whole, fits, dense = [], [], []
    for each, row in _rows(benchmarks, "calibration", "intervention"):
        model, length, sequences = row["model"], row["point"]["length"], row["point"]["batch_size"]
        quoted = paper.intervention(model, length, row["rate"], sequences)
        whole.append(
            {
                "intervention": f"{Path(model).name}, {length}x{sequences}, {100 * row['rate']:g}% of heads",
                **{name: seconds(stage["median"]) for name, stage in row["stages"].items()},
                "whole": seconds(row["spread"]["median"]),
                "range": f"{seconds(row['spread']['min'])} to {seconds(row['spread']['max'])}",
                "first use": seconds(row["first_seconds"]),
                "paper": quoted or MISSING,
                "in": each.name,
            }
        )
    yield "", frame(whole, ("intervention",))
    for each, row in _rows(benchmarks, "calibration", "fit"):
        over = row["excess_kl"]
        over = MISSING if over is None else f"{scientific(over)} nats{_limit(over, row['bar_excess_kl'], ' nats')}"
        fits.append(
            {
                "of": Path(row["of"]).name,
                "heads": number(row["heads"]),
                "tokens": number(row["length"]),
                "warm median": seconds(row["seconds"]) + _limit(row["seconds"], row["bar_seconds"], " s"),
                "first use": seconds(row["seconds"] + row["first_use_seconds"]),
                "sweeps, mean and most": f"{row['sweeps']['mean']:.1f}, {row['sweeps']['max']}",
                "worst KL": f"{row['worst_kl']:.4f} nats",
                "not converged": number(row["not_converged"]),
                "KL over the reference, at most": over,
                "in": each.name,
            }
        )
    yield "Fit of all heads and its KL", frame(fits, ("of",))
    for each, row in _rows(benchmarks, "calibration", "dense"):
        error = max(row["difference"].values())
        ratio = lambda name, row=row: "refused" if row["refused"] else f"{row[name]:.1f}×"  # noqa: E731
        dense.append(
            {
                "point": f"{Path(row['model']).name} {shape(row['point'])}",
                "layers measured": f"{row['layers']} of {row['of_layers']}" + ", extrapolated" * row["extrapolated"],
                "dense, all layers": seconds(row["seconds"]),
                "ours": seconds(row["statistics_seconds"]),
                "ratio": ratio("ratio"),
                "intervention with it": seconds(row["intervention_seconds"]),
                "ratio of wholes": ratio("intervention_ratio"),
                "ours from float64, relative": scientific(error) + _limit(error, row["bar_difference"]),
                "in": each.name,
            }
        )
    yield "Dense collection of the same queries and keys, in float32, as the baseline", frame(dense, ("point",))


def _limit(value: float, limit: float | None, unit: str = "") -> str:
    return "" if limit is None else f" ({'within' if value <= limit else 'above'} {limit:g}{unit})"


def scientific(value: float | None) -> str:
    """Return an error as the paper writes them: 1.19e-7."""
    return MISSING if value is None else re.sub("e([+-])0", r"e\1", f"{value:.2e}").replace("e+", "e")


_PARTS = {
    "layer": "a layer of live and frozen heads",
    "pruned layer": "a layer whose heads are pruned",
    "transitions": "a model after each freezing, pruning or undoing of heads",
    "operator": "frozen heads alone, operands in the dtype",
}


def errors(benchmarks: Sequence[Benchmark]) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield the largest error of each part, backend and precision, beside its limit and the paper's."""
    lines = []
    for each in benchmarks:
        where = lambda row: (row["part"], row["backend"], row["precision"])  # noqa: E731
        for (part, backend, precision), group in (
            groupby(each.record["rows"], where) if each.record["kind"] == "errors" else ()
        ):
            rows, place = list(group), {"fp32": 1, "bf16": 3}[precision]
            papers = [paper.GRADIENT_ERRORS.get(row["tensor"]) for row in rows] if part == "layer" else []
            quoted = [each[place] for each in papers if each] + [paper.PRUNED_ERRORS[precision]] * (
                part == "pruned layer"
            )
            lines.append(
                {
                    "of": _PARTS[part],
                    "backend": backend or MISSING,
                    "precision": precision,
                    "tensors": str(len(rows)),
                    "relative L2": scientific(max(row["relative_l2"] for row in rows)),
                    "largest share of its limit": f"{max(row['relative_l2'] / row['limit'] for row in rows):.0%}",
                    "within": "yes" if all(row["within"] for row in rows) else "above",
                    "unfrozen layer or PyTorch's attention": scientific(
                        max(row["beside"]["relative_l2"] for row in rows)
                    ),
                    "from eager, L2": scientific(
                        max((row["eager"]["relative_l2"] for row in rows if row["eager"]), default=None)
                    ),
                    "paper, L2": max(quoted, key=float, default=MISSING),
                    "in": each.name,
                }
            )
    yield "Largest relative L2 error of output and gradients", frame(lines, ("of", "backend", "precision"))


TABLES: dict[str, Callable[[Sequence[Benchmark]], Iterator[tuple[str, pd.DataFrame]]]] = {
    **{kind: partial(speeds, kind=kind) for kind in SPEEDS},
    **{"finetune": finetuning, "nanogpt": nanogpt, "compile": compilation, "calibration": freezing, "errors": errors},
}
"""The tables of each kind of record."""
