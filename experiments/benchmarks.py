"""Tables of the committed benchmark records, as DataFrames of text with the paper's numbers.

Where two records measured the same point and arm on the same device, the newest accepted measurement stands.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from experiments import paper
from experiments.records import Record
from experiments.tables import scientific
from saf.bench.models import shape_of
from saf.hf.families import TRANSFORMERS
from saf.models.gpt import PRESETS
from saf.ops.fused import are_few
from saf.records.files import read_json
from saf.records.table import MISSING, natural_order, number, seconds
from saf.report.benchmarks import SPEEDS, means, memory_cells, shape, speed_cells, table_title

Cells = dict[str, Any]
Tables = Iterator[tuple[str, pd.DataFrame]]
"""Tables with their titles."""
_USUAL_LAYER = (12, 12, 64)
"""Query heads, KV heads and channels of a layer of the 124M model; another layer is named."""


def read_benchmarks(results: Path) -> list[Record]:
    """Return the benchmark records of a folder of results by name in natural order."""
    paths = sorted((results / "bench").glob("*.json"), key=lambda path: natural_order(path.as_posix()))
    return named({path.stem: read_json(path) for path in paths})


def named(by_name: Mapping[str, Record]) -> list[Record]:
    """Return records with their `name`, and as `elsewhere` their device where most records are of another, else "".

    Tables also read the optional `quoted_as`: the measurement (`of`) and `model` that the paper's numbers are found by.
    """
    records: list[Any] = [{**record, "name": name} for name, record in by_name.items()]
    devices = pd.Series([record["provenance"].get("device") for record in records], dtype=object)
    usual = (*devices.mode()[:1], None)  # no mode where there are no records
    for record, device in zip(records, devices, strict=True):
        # "NVIDIA H100 80GB HBM3" becomes "H100".
        short = re.sub(r"[\s-]\d+\s?GB\b.*", "", str(device).removeprefix("NVIDIA "))
        record["elsewhere"] = "" if device in usual else short
    return records


def without_path(record: Record) -> Record:
    """Return a record in which the folder of a model, which says nothing to a reader, is "a trained model"."""
    settings, name = record["settings"], "a trained model"
    if settings.get("model") in (None, *PRESETS, *TRANSFORMERS):
        return record
    rows = [{**row, "model": name} if "model" in row else row for row in record["rows"]]
    return {**record, "settings": {**settings, "model": name}, "rows": rows}


def frame(lines: Iterable[Cells], labels: Sequence[str]) -> pd.DataFrame:
    """Return lines as a table of text without empty columns; the columns `labels` are joined to its index."""
    shown = [{name: value for name, value in line.items() if not name.startswith("_")} for line in lines]
    table: Any = pd.DataFrame(shown).fillna(MISSING)
    table = table[[name for name in table if not (table[name] == MISSING).all()]]
    labels = [name for name in labels if name in table]
    table.index = pd.Index(table[labels].agg("; ".join, axis=1), name="; ".join(labels))
    return table.drop(columns=labels)


def speeds(records: Sequence[Record], kind: str) -> Tables:
    """Yield a table for each way that passes were run in records of a kind."""
    order = ("length", "batch_size", "accumulation")
    lines = sorted(
        _newest([line for record in records if record["kind"] == kind for line in _speed_lines(record)]),
        key=lambda line: (*(line["_row"]["point"].get(name, 0) for name in order), line["_row"]["baseline"]),
    )
    for title in dict.fromkeys(line["_way"] for line in lines):
        chosen = [dict(line) for line in lines if line["_way"] == title]
        if len({line["baseline"] for line in chosen}) == 1:
            chosen = [{**line, "baseline": MISSING} for line in chosen]
        yield title, frame(chosen, ("point", "baseline", "arm"))


def _speed_lines(record: Record) -> Iterator[Cells]:
    """Yield the lines of a record; columns that begin with "_" order and compare lines, and are not shown."""
    unusual, provenance = unusual_settings(record), record["provenance"]
    for row, cells in speed_cells(record):
        pinned = "kernel pinned" if record["kind"] == "prefill" and _is_pinned(row) else ""
        # PyTorch's choice ("auto") was cuDNN wherever a profile was taken, so both are one measurement; but not as an
        # ordinary arm, which may be measured against the other.
        baseline, arm = (re.sub(" auto$", " cudnn", row[name]) for name in ("baseline", "arm"))
        compared = baseline, arm if row["backend"] else row["arm"]
        yield {
            **cells,
            "arm": ", ".join(filter(None, [cells["arm"], pinned])),
            "paper": _paper_speed(record, row) or MISSING,
            "in": record["name"],
            "_row": row,
            "_way": table_title(row, unusual),
            "_same": (provenance.get("device"), unusual, table_title(row), *row["point"].items(), *compared, pinned),
            "_order": (not row["refused"], str(provenance.get("date"))),
        }


def _newest(lines: Sequence[Cells]) -> list[Cells]:
    """Return the newest line of each measurement, in order; a refused one never replaces an accepted one."""
    places = sorted(range(len(lines)), key=lambda place: lines[place]["_order"])
    newest = {lines[place]["_same"]: place for place in places}  # of equal measurements the last one stays
    return [lines[place] for place in sorted(newest.values())]


def memory(records: Sequence[Record], kind: str) -> pd.DataFrame:
    """Return the peak memory of arms that records of a kind measured."""
    lines = []
    for record in (each for each in records if each["kind"] == kind):
        layers = record["settings"].get("num_layers")
        for entry in record["memory"]:
            model = str(record["settings"].get("model")) + ("" if layers is None else f", {layers} layers")
            quoted = _quoted(paper.MEMORY, {"of": kind, "model": model, **record.get("quoted_as", {})}, entry)
            model = ", ".join(filter(None, [model, unusual_settings(record)]))
            cells = {"model": model, **memory_cells(record, entry)}
            lines.append({**cells, "paper": quoted or MISSING, "in": record["name"]})
    return frame(lines, ("model", "point", "arm"))


def unusual_settings(record: Record) -> str:
    """Return, in words, the settings that make a record's rows other measurements than usual; "" for none."""
    settings, on_gpu = record["settings"], bool(record["provenance"].get("driver"))
    placed = {"even": "as many heads in every layer frozen", "groups": "whole groups frozen"}
    words = _unusual_layers(record) if record["kind"] == "op" else []
    words.append(placed.get(settings.get("placement", ""), ""))
    if settings.get("per_layer"):
        words.append(f"{' '.join(map(str, settings['per_layer']))} heads of the layers frozen")
    words.append(_unusual_compilation(record))
    if settings.get("activation_checkpointing"):
        words.append("layers computed again")
    if settings.get("parallel", "none") != "none":
        processes = record["provenance"].get("processes", 1)
        words.append(f"{settings['parallel']}, {processes} process{'es' if processes > 1 else ''}")
    if settings.get("fresh"):
        words.append("processes of their own")
    if settings.get("dtype", "auto") not in ("auto", "bf16" if on_gpu else "fp32"):
        words.append(settings["dtype"])
    if record["elsewhere"]:
        words.append(f"on {record['elsewhere']}")
    return ", ".join(filter(None, words))


def _unusual_layers(record: Record) -> list[str]:
    layers = {tuple(row["layer"].values()) for row in record["rows"] if row.get("layer")} - {_USUAL_LAYER}
    words = [f"{heads} heads of {dim}, {kv_heads} of keys" for heads, kv_heads, dim in layers]
    return [*words, "whole groups frozen"] if record["settings"].get("whole_groups") else words


def _unusual_compilation(record: Record) -> str:
    on_gpu = bool(record["provenance"].get("driver"))
    usual = "off" if record["kind"] in ("finetune", "attention") else "auto"
    setting = record["settings"].get("compile", usual)
    if setting == "layers":
        return "compiled by layers"
    # "auto" compiles on a GPU alone.
    is_compiled, usually = (one == "on" or (one == "auto" and on_gpu) for one in (setting, usual))
    if is_compiled == usually:
        return ""
    return "compiled" if is_compiled else "not compiled"


def _is_pinned(row: Record) -> bool:
    """Return whether the pinned kernel costs a frozen layer a second launch: left free, it takes one for few tokens.

    Such rows are no measure of a model left to PyTorch's choice of kernel.
    """
    name, point = row["model"].split(",")[0], row["point"]
    if row["backend"] != "toeplitz" or row["kernel"] == "auto" or point.get("precision") == "fp32":
        return False
    if name not in PRESETS and name not in TRANSFORMERS:
        return False
    sizes = shape_of(name, point["length"])
    values = torch.empty(point["batch_size"], sizes.num_kv_heads, point["length"], sizes.head_dim, device="meta")
    return are_few(values, sizes.num_heads, replayed=row["variant"] == "graph")


def _paper_speed(record: Record, row: Record) -> str | None:
    kind, variant, model, layer = record["kind"], row["variant"], row.get("model", ""), row.get("layer") or {}
    of = ""
    if kind == "update" and not variant.endswith(" graph"):  # the paper replayed no update
        of = "four GPUs" if record["provenance"].get("processes", 1) > 1 else "update"
    elif kind == "prefill":
        of = "graph" if variant == "graph" else "call"
    elif kind == "op" and row["part"] == "layer" and variant.startswith("forward"):
        is_qwen = [layer[name] for name in ("num_heads", "num_kv_heads", "head_dim")] == [32, 8, 128]
        of, model = "attention", "qwen3-4b" if is_qwen else ""
    quoted_as = {"of": of, "model": model, **record.get("quoted_as", {})}
    return _quoted(paper.SPEEDS, quoted_as, row) if row["backend"] else None


def _quoted(
    numbers: Mapping[paper.Point, Mapping[float, str]], quoted_as: Mapping[str, str], row: Record
) -> str | None:
    point, heads = row["point"], "pruned" if row["backend"] == "pruned" else "frozen"
    place = quoted_as["of"], quoted_as["model"], point["length"], point["batch_size"], heads
    return numbers.get(place, {}).get(row["rate"])


# --- other kinds


def finetuning(records: Sequence[Record]) -> Tables:
    """Yield means over the orders of examples: a table a task, and one where passes were replayed as graphs."""
    for record in records:
        for graphed in (False, True) if record["kind"] == "finetune" else ():
            lines = []
            for row, cells in means(record, graphed=graphed):
                place = row["variant"].split()[0], row["rate"]
                is_papers = row["model"] == "124m" and row["role"] == "frozen" and place in paper.FINETUNING_UPDATES
                quoted = f"{paper.FINETUNING_UPDATES[place]['speedup']}×" if is_papers else MISSING
                lines.append({**cells, "paper": quoted})
            if lines:
                title = f"{record['rows'][0]['model']}, {record['settings']['task']}: mean over the orders"
                yield f"{title}{', passes replayed as CUDA graphs' if graphed else ''}", frame(lines, ("arm",))


def _rows(records: Sequence[Record], kind: str, part: str | None = None) -> Iterator[tuple[str, Record]]:
    for record in records:
        if record["kind"] == kind:
            yield from ((record["name"], row) for row in record["rows"] if part in (None, row.get("part")))


def _speedup(row: Record, name: str = "speedup") -> Cells:
    refused = row["refused"]
    return {
        name: "refused" if refused else f"{row['ratio']:.3f}×",
        "middle half of pairs": MISSING if refused else f"{row['q25']:.3f} to {row['q75']:.3f}",
        "pairs": number(row["pairs"]),
        "control": MISSING if row["control_ratio"] is None else f"{row['control_ratio']:.4f}",
    }


def _tokens_per_second(row: Record, side: str) -> str:
    return f"{1e3 * math.prod(row['point'].values()) / row[side]:,.0f}"


def nanogpt(records: Sequence[Record]) -> Tables:
    """Yield the table of ordinary updates and nanoGPT's."""
    lines = [
        {
            "model": row["model"],
            "point": shape(row["point"]),
            "nanoGPT, ms": number(row["baseline_ms"]),
            "ours, ms": number(row["arm_ms"]),
            **_speedup(row),
            "nanoGPT, tokens/s": _tokens_per_second(row, "baseline_ms"),
            "ours, tokens/s": _tokens_per_second(row, "arm_ms"),
            "in": name,
        }
        for name, row in _rows(records, "nanogpt")
        if not row["control"]
    ]
    yield "", frame(lines, ("model", "point"))


def compilation(records: Sequence[Record]) -> Tables:
    """Yield what an event costs in compilation, and updates of models compiled whole and by layers."""
    forms = {"whole": "the whole model", "layers": "by decoder layers"}
    caches = {"empty": "empty", "ahead": "filled ahead", "warm": "of an earlier process"}  # the last two of old records
    events = [
        {
            "model": row["model"],
            "point": shape(row["point"]),
            "compiled": forms[row["form"]],
            "cache on disk": caches[row["caches"]],
            "event": row["event"],
            "heads frozen": number(row["frozen"]),
            "lost": seconds(row["lost_s"]),
            "first update": seconds(row["first_s"]),
            "update after it": seconds(row["update_s"]),
            "in": name,
        }
        for name, row in _rows(records, "compile", "event")
    ]
    yield "", frame(events, ("model", "point", "compiled", "cache on disk", "event"))
    pairs = []
    for name, row in _rows(records, "compile", "pair"):
        # The control says how far two equal models differ, and has no line of its own.
        if row.get("control"):
            continue
        cells = {"model": row["model"], "point": shape(row["point"]), "frozen": f"{100 * row['rate']:g}%"}
        cells |= {"whole, ms": number(row["baseline_ms"]), "by layers, ms": number(row["arm_ms"])}
        cells |= _speedup(row, "whole / by layers")
        for form, words in (("whole", "kernels whole"), ("layers", "kernels by layers")):
            if busy := row.get("busy", {}).get(form):
                cells[words] = f"{number(busy['kernels'])}, {number(busy['ms'])} ms"
        pairs.append({**cells, "in": name})
    yield "Updates compiled whole and by layers", frame(pairs, ("model", "point"))


def freezing(records: Sequence[Record]) -> Tables:
    """Yield the warm seconds of interventions and of fits, and of dense collection as their baseline."""
    for part, title, cells, label in (
        ("intervention", "", _intervention_cells, "intervention"),
        ("fit", "Fit of all heads and its KL", _fit_cells, "of"),
        ("dense", _DENSE_TITLE, _dense_cells, "point"),
    ):
        lines = [{**cells(row), "in": name} for name, row in _rows(records, "calibration", part)]
        yield title, frame(lines, (label,))


_DENSE_TITLE = "Dense collection of the same queries and keys, in float32, as the baseline"


def _intervention_cells(row: Record) -> Cells:
    model, length, sequences = row["model"], row["point"]["length"], row["point"]["batch_size"]
    return {
        "intervention": f"{Path(model).name}, {length}x{sequences}, {100 * row['rate']:g}% of heads",
        **{name: seconds(stage["median"]) for name, stage in row["stages"].items()},
        "whole": seconds(row["spread"]["median"]),
        "range": f"{seconds(row['spread']['min'])} to {seconds(row['spread']['max'])}",
        "first use": seconds(row["first_seconds"]),
        "paper": paper.INTERVENTION.get((model, length, row["rate"], sequences), MISSING),
    }


def _fit_cells(row: Record) -> Cells:
    over = row["excess_kl"]
    over = MISSING if over is None else f"{scientific(over)} nats{_limit(over, row['bar_excess_kl'], ' nats')}"
    return {
        "of": Path(row["of"]).name,
        "heads": number(row["heads"]),
        "tokens": number(row["length"]),
        "warm median": seconds(row["seconds"]) + _limit(row["seconds"], row["bar_seconds"], " s"),
        "first use": seconds(row["seconds"] + row["first_use_seconds"]),
        "sweeps, mean and most": f"{row['sweeps']['mean']:.1f}, {row['sweeps']['max']}",
        "worst KL": f"{row['worst_kl']:.4f} nats",
        "not converged": number(row["not_converged"]),
        "KL over the reference, at most": over,
    }


def _dense_cells(row: Record) -> Cells:
    error = max(row["difference"].values())
    extrapolated = ", extrapolated" if row["extrapolated"] else ""
    ratio, of_wholes = (
        "refused" if row["refused"] else f"{row[name]:.1f}×" for name in ("ratio", "intervention_ratio")
    )
    return {
        "point": f"{Path(row['model']).name} {shape(row['point'])}",
        "layers measured": f"{row['layers']} of {row['of_layers']}{extrapolated}",
        "dense, all layers": seconds(row["seconds"]),
        "ours": seconds(row["statistics_seconds"]),
        "ratio": ratio,
        "intervention with it": seconds(row["intervention_seconds"]),
        "ratio of wholes": of_wholes,
        "ours from float64, relative": scientific(error) + _limit(error, row["bar_difference"]),
    }


def _limit(value: float, limit: float | None, unit: str = "") -> str:
    return "" if limit is None else f" ({'within' if value <= limit else 'above'} {limit:g}{unit})"


_PARTS = {
    "layer": "a layer of live and frozen heads",
    "pruned layer": "a layer whose heads are pruned",
    "transitions": "a model after each freezing, pruning or undoing of heads",
    "operator": "frozen heads alone, operands in the dtype",
}


def errors(records: Sequence[Record]) -> Tables:
    """Yield the largest error of each part, backend and precision, with its limit and the paper's."""
    lines = []
    by_part: dict[tuple[str, str, str | None, str], list[Record]] = {}
    for name, row in _rows(records, "errors"):
        by_part.setdefault((name, row["part"], row["backend"], row["precision"]), []).append(row)
    for (name, part, backend, precision), rows in by_part.items():
        column = {"fp32": 1, "bf16": 3}[precision]  # of relative L2 in GRADIENT_ERRORS
        papers = [paper.GRADIENT_ERRORS.get(row["tensor"]) for row in rows] if part == "layer" else []
        quoted = [each[column] for each in papers if each]
        if part == "pruned layer":
            quoted.append(paper.PRUNED_ERRORS[precision])
        eager = max((row["eager"]["relative_l2"] for row in rows if row["eager"]), default=None)
        lines.append(
            {
                "of": _PARTS[part],
                "backend": backend or MISSING,
                "precision": precision,
                "tensors": str(len(rows)),
                "relative L2": scientific(max(row["relative_l2"] for row in rows)),
                "largest share of its limit": f"{max(row['relative_l2'] / row['limit'] for row in rows):.0%}",
                "within": "yes" if all(row["within"] for row in rows) else "above",
                "unfrozen layer or PyTorch's attention": scientific(max(row["beside"]["relative_l2"] for row in rows)),
                "from eager, L2": scientific(eager),
                "paper, L2": max(quoted, key=float, default=MISSING),
                "in": name,
            }
        )
    yield "Largest relative L2 error of output and gradients", frame(lines, ("of", "backend", "precision"))


TABLES: dict[str, Callable[[Sequence[Record]], Tables]] = {
    **{kind: partial(speeds, kind=kind) for kind in SPEEDS},
    "finetune": finetuning,
    "nanogpt": nanogpt,
    "compile": compilation,
    "calibration": freezing,
    "errors": errors,
}
"""The tables of each kind of record."""
