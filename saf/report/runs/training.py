"""What the document of all results says about the training runs of one folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from saf.evaluate.side_by_side import arm_names, arms_table, compare_all
from saf.records.quantities import number
from saf.records.run import RecordedRun
from saf.records.text import markdown, markdown_block
from saf.report.provenance import device_and_versions, link, source

_COMPILED = {None: None, True: "compiled", False: "not compiled", "layers": "compiled by decoder layers"}
"""Of what a run records of its compilation; older ones record nothing."""


def training(folder: Path, runs: Sequence[RecordedRun], beside: Path) -> tuple[list[str], str]:
    """Return Markdown about the runs of one folder, the ordinary arm first, and the block of their commands.

    `beside` is the folder of the document that links to `folder`.
    """
    runs = sorted(runs, key=lambda run: (run.arm == "pruned", len(run.edited_heads), run.folder.name))
    names = arm_names(runs)
    origins = [(run.result or {}).get("provenance") or {} for run in runs]
    machines = "; ".join(dict.fromkeys(device_and_versions(each) for each in origins))
    codes = "; ".join(dict.fromkeys(source(each) for each in origins))
    table = arms_table(runs, names, compare_all(runs, names)).titled("")
    conditions = ", ".join(_conditions(runs[0]))
    told = f"{link(folder, beside).markdown()}: {markdown(f'{conditions}; {machines}; {codes}')}."
    return [told, table.markdown()], markdown_block("\n".join(dict.fromkeys(_command(run) for run in runs)))


def _conditions(run: RecordedRun) -> list[str]:
    """Return updates, tokens, shape, compilation and precision of a run, those that it records."""
    train = run.config.get("train") or {}
    tokens = (run.result or {}).get("tokens")
    words: list[Any] = [
        f"{number(train.get('updates'))} updates",
        f"{tokens / 1e6:,.1f}M tokens" if tokens else None,
        f"{train.get('length'):,} tokens × {train.get('batch_size')} sequences" if train.get("length") else None,
        _COMPILED[train.get("compile")],
        train.get("precision"),
    ]
    return list(filter(None, words))


def _command(run: RecordedRun) -> str:
    provenance = (run.result or {}).get("provenance") or {}
    return str(provenance.get("command") or f"# {run.folder.name}: command not recorded")
